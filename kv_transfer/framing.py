"""How a frame lies on the wire: a fixed header, a msgpack map, and behind DATA the raw bytes of one piece.

    0    2      3     4           8           12             16         20            20 + body_bytes
    +----+------+-----+-----------+-----------+--------------+----------+-------------+------------------+
    |"KV"|flags |kind |generation |body_bytes |payload_bytes |sum       | body        | payload (DATA)   |
    +----+------+-----+-----------+-----------+--------------+----------+-------------+------------------+

All integers little-endian. flags is 0. sum: the low 32 bits of xxh3_64 over header bytes 0–15 and the body, so a
flipped bit in control ends the link instead of changing its meaning; the payload has its own in the body of DATA.
Everything here comes from outside: each bound is checked before memory is taken, each error names its field.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

from msgspec import UNSET, DecodeError, ValidationError
from msgspec.msgpack import Decoder, Encoder
from xxhash import xxh3_64_intdigest

from kv_transfer.frames import FRAME_CLASSES, MAX_PIECE_BYTES, Frame, Kind
from pdserve.errors import InvalidRequest, InvariantViolated

MAGIC = b"KV"
MAX_BODY_BYTES = 64 << 10
_HEADER = struct.Struct("<2sBBIIII")
HEADER_BYTES = _HEADER.size
_SUMMED_BYTES = HEADER_BYTES - 4
_LOW_32 = 0xFFFFFFFF

_ENCODER = Encoder()
_DECODERS = {kind: Decoder(frame) for kind, frame in FRAME_CLASSES.items()}
_FIELD = re.compile(r"`\$\.(\w+)|field `(\w+)`")
"""Where msgspec's errors name the field."""


@dataclass(frozen=True, slots=True)
class Header:
    """A checked header. summed: its bytes under the checksum."""

    kind: int
    generation: int
    body_bytes: int
    payload_bytes: int
    checksum: int
    summed: bytes


def encode(frame: Frame, generation: int, payload_bytes: int = 0) -> bytes:
    """Header and body; the payload, if any, is sent behind them as it lies in the pool."""
    return enveloped(frame.kind, _ENCODER.encode(frame), generation, payload_bytes)


def enveloped(kind: int, body: bytes, generation: int, payload_bytes: int = 0) -> bytes:
    """A body behind its header."""
    if len(body) > MAX_BODY_BYTES:
        raise InvariantViolated("a frame over the bound", frame=kind, body_bytes=len(body))
    head = _HEADER.pack(MAGIC, 0, kind, generation, len(body), payload_bytes, 0)[:_SUMMED_BYTES]
    total = xxh3_64_intdigest(head + body) & _LOW_32
    return head + total.to_bytes(4, "little") + body


def kind_of(wire: bytes) -> Kind:
    """The kind of a frame that we have encoded ourselves."""
    return Kind(wire[3])


def parse_header(raw: bytes) -> Header:
    """raw: HEADER_BYTES bytes. Raises InvalidRequest."""
    magic, flags, kind, generation, body_bytes, payload_bytes, total = _HEADER.unpack(raw)
    if magic != MAGIC:
        raise _malformed("magic", MAGIC, magic)
    if flags != 0:
        raise _malformed("flags", 0, flags)
    if kind == 0:
        raise _malformed("kind", "a kind", kind)
    if body_bytes > MAX_BODY_BYTES:
        raise _malformed("body_bytes", f"at most {MAX_BODY_BYTES}", body_bytes)
    if kind == Kind.DATA and not 0 < payload_bytes <= MAX_PIECE_BYTES:
        raise _malformed("payload_bytes", f"1..{MAX_PIECE_BYTES}", payload_bytes)
    if kind != Kind.DATA and payload_bytes != 0:
        raise _malformed("payload_bytes", 0, payload_bytes)
    return Header(kind, generation, body_bytes, payload_bytes, total, raw[:_SUMMED_BYTES])


def parse_body(header: Header, body: bytes) -> Frame | None:
    """body: header.body_bytes bytes; None for a kind of a later version. Raises InvalidRequest."""
    total = xxh3_64_intdigest(header.summed + body) & _LOW_32
    if total != header.checksum:
        raise _malformed("sum", header.checksum, total)
    decoder = _DECODERS.get(header.kind)
    if decoder is None:
        return None
    try:
        return decoder.decode(body)
    except ValidationError as error:
        found = _FIELD.search(str(error))
        field = found and (found[1] or found[2])
        raise InvalidRequest(
            "malformed frame", frame=Kind(header.kind).name, field=field or "body", why=str(error)[:200]
        ) from None
    except (DecodeError, RecursionError) as error:
        raise _malformed("body", "msgpack", type(error).__name__) from None


def unknown_in(frame: Frame | None, body: bytes) -> str:
    """What this version doesn't know of a frame and its body: "kind", "field", or nothing: ""."""
    if frame is None:
        return "kind"
    num_known = sum(getattr(frame, name) is not UNSET for name in frame.__struct_fields__)
    return "field" if _num_entries(body) > num_known else ""


def _num_entries(body: bytes) -> int:
    """Of the msgpack map that a decoder has found here."""
    first = body[0]
    if first < 0x90:
        return first & 0x0F
    return int.from_bytes(body[1 : 3 if first == 0xDE else 5], "big")


def _malformed(field: str, want: object, got: object) -> InvalidRequest:
    return InvalidRequest("malformed frame", field=field, want=want, got=repr(got)[:60])
