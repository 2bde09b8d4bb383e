"""Frozen messages of every kind: their bytes as they were first written, and what they say.

A line is {"wire", "kind", "octets": hex, "says": the message's fields}. The file is never rewritten: what a release
has sent must be read, and written, the same by every later one. `tests.support.draw_wire_corpus` adds lines for
kinds that are new.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from kv_transfer.framing import HEADER_BYTES, encode, parse_body, parse_header
from pdserve import response, status
from pdserve.rpc import convert
from pdserve.rpc.v1 import inference_pb2 as ipb
from pdserve.rpc.v1 import session_pb2 as spb

PATH = Path(__file__).parents[1] / "unit" / "rpc" / "wire_corpus.jsonl"
GENERATION = 7
PAYLOAD_BYTES = 5
"""Of a DATA frame's piece, which is not in the corpus."""
RENAMED = {
    ("up", "Started"): "DecodeStarted",
    ("up", "Finished"): "SequenceFinished",
    ("link", "Hello"): "LinkHello",
    ("link", "Stale"): "StaleLease",
}
"""Kinds whose classes have had other names since they were frozen; names aren't on the wire."""


@dataclass(frozen=True)
class Wire:
    """How messages of one stream are written and read."""

    write: Callable[[Any], bytes]
    read: Callable[[bytes], Any]


@dataclass(frozen=True)
class Line:
    """One frozen message."""

    wire: str
    kind: str
    octets: bytes
    says: dict[str, Any]


def _protobuf(kind: Any, to_proto: Callable[[Any], Any], from_proto: Callable[[Any], Any]) -> Wire:
    return Wire(
        lambda message: to_proto(message).SerializeToString(deterministic=True),
        lambda octets: from_proto(kind.FromString(octets)),
    )


def _write_frame(frame: Any) -> bytes:
    return encode(frame, GENERATION, PAYLOAD_BYTES if type(frame).__name__ == "Data" else 0)


def _read_frame(octets: bytes) -> Any:
    return parse_body(parse_header(octets[:HEADER_BYTES]), octets[HEADER_BYTES:])


WIRES: dict[str, Wire] = {
    "up": _protobuf(spb.Up, convert.up_to_proto, convert.up_from_proto),
    "down": _protobuf(spb.Down, convert.down_to_proto, convert.down_from_proto),
    "answer": _protobuf(ipb.GenerateResponse, response.event_to_proto, response.event_from_proto),
    "model": _protobuf(ipb.GetModelResponse, status.MODEL_INFO.write, status.MODEL_INFO.read),
    "status": _protobuf(ipb.GetStatusResponse, status.CLUSTER_STATUS.write, status.CLUSTER_STATUS.read),
    "link": Wire(_write_frame, _read_frame),
}


def plain(value: Any) -> Any:
    """What a message says, as JSON holds it."""
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, bytes):
        return f"0x{value.hex()}"
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return [plain(each) for each in value]
    return value


def said(message: Any, says: Any) -> Any:
    """The same of a message of today: the fields that it had when it was frozen, in whatever form it has them now."""
    if isinstance(says, dict) and not isinstance(message, Mapping):
        return {name: said(getattr(message, name), value) for name, value in says.items()}
    if isinstance(says, list) and len(message) == len(says):
        return [said(now, then) for now, then in zip(message, says)]
    return plain(message)


@cache
def lines() -> tuple[Line, ...]:
    """The whole corpus."""
    found = []
    for text in PATH.read_text("utf-8").splitlines():
        line = json.loads(text)
        kind = RENAMED.get((line["wire"], line["kind"]), line["kind"])
        found.append(Line(line["wire"], kind, bytes.fromhex(line["octets"]), line["says"]))
    return tuple(found)
