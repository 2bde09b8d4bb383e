"""Session messages to protobuf and back: protobuf objects stop here.

The rules are codec.py's. What a message of a later version holds and this one doesn't know is not read: a reader
gives None for a kind that it doesn't know.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdserve import messages as m
from pdserve.errors import InvalidRequest
from pdserve.rpc.codec import Converter, Converters, OneOf, compile_converter
from pdserve.rpc.params import params_from, params_to
from pdserve.rpc.v1 import session_pb2 as pb
from pdserve.sampling import SampleKey, SamplingParams

_RESOLVED = ("temperature", "top_k", "top_p", "max_tokens")

_key = compile_converter(
    SampleKey, pb.Sampling, {SamplingParams: Converter(params_to, params_from)}, beside=("max_tokens",)
)


def _key_to(key: SampleKey) -> pb.Sampling:
    """`max_tokens` travels resolved, in the parameters; it is set even where the request left it open."""
    msg: pb.Sampling = _key.write(key)
    msg.params.max_tokens = key.max_tokens
    return msg


def _key_from(msg: pb.Sampling) -> SampleKey:
    is_set: Callable[[Any], bool] = msg.params.HasField  # by a name that isn't a literal
    for name in _RESOLVED:
        if not is_set(name):
            raise InvalidRequest("sampling between router and worker must be resolved", missing=name)
    key = _key.read(msg, max_tokens=msg.params.max_tokens)
    if not all(key.bad_word_ids):
        raise InvalidRequest("a bad word without ids forbids nothing", field="bad_word_ids")
    return key


_own: Converters = {SampleKey: Converter(_key_to, _key_from)}
_up: OneOf[m.Up] = OneOf(m.Up, pb.Up)
_down: OneOf[m.Down] = OneOf(m.Down, pb.Down, _own)

up_to_proto, up_from_proto = _up.write, _up.read
down_to_proto, down_from_proto = _down.write, _down.read
