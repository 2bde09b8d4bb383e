"""How many fields a message has, counted in its bytes, before the library makes an object of each."""

from __future__ import annotations

from functools import cache
from typing import Any

from pdserve.errors import too_large
from pdserve.steps import Steps

MAX_PARTS = 262_144
_PARTS_A_STEP = 8_192


class _NotAMessage(Exception):
    """The library will say so."""


Fields = dict[int, Any]
"""Of a message: the numbers of those fields that are messages, with theirs."""


def check_parts(raw: bytes, fields: Fields) -> Steps[None]:
    """Raises InvalidRequest for a message of too many fields, those of messages in it included.

    fields  by `message_fields`
    What is no message at all is left to the library. (A list of numbers is one field, unless it is written otherwise.)
    """
    num_parts, at = 0, 0
    outer: list[tuple[int, Fields]] = []  # where the messages around this one end
    end = len(raw)
    try:
        while True:
            if at >= end:
                if not outer:
                    return
                end, fields = outer.pop()
                continue
            num_parts += 1
            if num_parts % _PARTS_A_STEP == 0:
                if num_parts >= MAX_PARTS:
                    raise too_large("fields", "the message has too many fields", limit=MAX_PARTS)
                yield
            tag, at = _varint(raw, at)
            match tag & 7:
                case 0:
                    _, at = _varint(raw, at)
                case 1:
                    at += 8
                case 2:
                    size, at = _varint(raw, at)
                    inner = fields.get(tag >> 3)
                    if inner is None:
                        at += size
                    else:
                        outer.append((end, fields))
                        end, fields = at + size, inner
                case 5:
                    at += 4
    except (IndexError, _NotAMessage):
        return


@cache
def message_fields(descriptor: Any) -> Fields:
    """Of a message class that doesn't hold itself; to be read only."""
    return {
        field.number: message_fields(field.message_type) for field in descriptor.fields if field.message_type
    }


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """The number there, and where it ends."""
    byte = raw[at]
    if byte < 128:
        return byte, at + 1
    number, shift = byte & 127, 7
    while shift < 64:
        at += 1
        byte = raw[at]
        number |= (byte & 127) << shift
        if byte < 128:
            return number, at + 1
        shift += 7
    raise _NotAMessage
