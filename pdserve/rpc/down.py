"""Messages from router to worker, to protobuf and back; `pdserve.rpc.convert` is the entry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdserve import messages as m
from pdserve.errors import InvalidRequest
from pdserve.rpc import values as v
from pdserve.rpc.v1 import session_pb2 as pb


def to_proto(message: m.Down) -> pb.Down:
    """The protobuf form of any downward message."""
    match message:
        case m.StartDecode():
            return pb.Down(start_decode=_start_decode_to(message))
        case m.StartPrefill():
            return pb.Down(start_prefill=_start_prefill_to(message))
        case m.Abort():
            return pb.Down(abort=pb.AbortAttempt(handle=message.handle))
        case m.DownHeartbeat():
            return pb.Down(heartbeat=pb.DownHeartbeat())
        case m.Demand():
            return pb.Down(demand=pb.Demand(num_queued_tokens=message.num_queued_tokens))
        case m.Pair():
            worker = v.worker_to(message.decode_worker)
            return pb.Down(pair=pb.Pair(decode_worker=worker, addresses=message.addresses))
        case m.Unpair():
            return pb.Down(unpair=pb.Unpair(decode_worker=v.worker_to(message.decode_worker)))
        case m.Welcome():
            welcome = pb.Welcome(router_id=message.router_id, wants_tokenizer=message.wants_tokenizer)
            return pb.Down(welcome=welcome)
        case m.Drain():
            return pb.Down(drain=pb.Drain())
        case m.SetRole():
            return pb.Down(set_role=pb.SetRole(role=v.ROLE_NUMBERS[message.role]))
        case m.Superseded():
            return pb.Down(superseded=pb.Superseded())


def from_proto(msg: pb.Down) -> m.Down:
    """Raises InvalidRequest if the message is empty or must not exist."""
    name = msg.WhichOneof("message")
    if name is None:
        raise InvalidRequest("an empty message, or one of a later version, came from the router")
    return _READERS[name](getattr(msg, name))


def _start_prefill_to(message: m.StartPrefill) -> pb.StartPrefill:
    return pb.StartPrefill(
        handle=message.handle,
        token_ids=message.token_ids,
        num_prompt_tokens=message.num_prompt_tokens,
        sampling=v.key_to(message.key),
        deadline_left_s=message.deadline_left_s,
        num_strikes=message.num_strikes,
        lease_id=message.lease_id,
        decode_worker=v.worker_to(message.decode_worker),
        num_skip_blocks=message.num_skip_blocks,
        cache_salt=message.cache_salt,
    )


def _start_prefill_from(msg: pb.StartPrefill) -> m.StartPrefill:
    _check_tokens(msg)
    return m.StartPrefill(
        handle=v.handle_from(msg.handle),
        token_ids=tuple(msg.token_ids),
        num_prompt_tokens=msg.num_prompt_tokens,
        key=v.key_from(msg.sampling),
        deadline_left_s=v.seconds_from(msg.deadline_left_s, "deadline_left_s"),
        num_strikes=msg.num_strikes,
        lease_id=v.handle_from(msg.lease_id),
        decode_worker=v.worker_from(msg.decode_worker),
        num_skip_blocks=msg.num_skip_blocks,
        cache_salt=msg.cache_salt,
    )


def _start_decode_to(message: m.StartDecode) -> pb.StartDecode:
    return pb.StartDecode(
        handle=message.handle,
        token_ids=message.token_ids,
        num_prompt_tokens=message.num_prompt_tokens,
        sampling=v.key_to(message.key),
        deadline_left_s=message.deadline_left_s,
        num_strikes=message.num_strikes,
        source=None if message.source is None else v.worker_to(message.source),
        priority=message.priority,
        age_s=message.age_s,
        cache_salt=message.cache_salt,
    )


def _start_decode_from(msg: pb.StartDecode) -> m.StartDecode:
    _check_tokens(msg)
    return m.StartDecode(
        handle=v.handle_from(msg.handle),
        token_ids=tuple(msg.token_ids),
        num_prompt_tokens=msg.num_prompt_tokens,
        key=v.key_from(msg.sampling),
        deadline_left_s=v.seconds_from(msg.deadline_left_s, "deadline_left_s"),
        num_strikes=msg.num_strikes,
        source=v.worker_from(msg.source) if msg.HasField("source") else None,
        priority=msg.priority,
        age_s=v.seconds_from(msg.age_s, "age_s"),
        cache_salt=msg.cache_salt,
    )


def _check_tokens(msg: pb.StartPrefill | pb.StartDecode) -> None:
    if not 1 <= msg.num_prompt_tokens <= len(msg.token_ids):
        raise InvalidRequest(
            "want 1 <= num_prompt_tokens <= number of token ids",
            num_prompt_tokens=msg.num_prompt_tokens,
            num_token_ids=len(msg.token_ids),
        )


_READERS: dict[str, Callable[[Any], m.Down]] = {
    "start_prefill": _start_prefill_from,
    "start_decode": _start_decode_from,
    "abort": lambda msg: m.Abort(v.handle_from(msg.handle)),
    "pair": lambda msg: m.Pair(v.worker_from(msg.decode_worker), tuple(msg.addresses)),
    "unpair": lambda msg: m.Unpair(v.worker_from(msg.decode_worker)),
    "demand": lambda msg: m.Demand(msg.num_queued_tokens),
    "drain": lambda msg: m.Drain(),
    "set_role": lambda msg: m.SetRole(v.role_from(msg.role)),
    "superseded": lambda msg: m.Superseded(),
    "heartbeat": lambda msg: m.DownHeartbeat(),
    "welcome": lambda msg: m.Welcome(msg.router_id, msg.wants_tokenizer),
}
