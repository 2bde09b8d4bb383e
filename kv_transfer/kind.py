"""The kinds of frames, and the form in which an error lies in one."""

from __future__ import annotations

from enum import IntEnum

from kv_transfer.fields import Fields
from pdserve.errors import Failure

_MAX_ERROR_CHARS = 100
_MAX_MESSAGE_CHARS = 1000
_MAX_FIELDS = 16
_MAX_VALUE_CHARS = 512


class Kind(IntEnum):
    """The kind of a frame, as in its header; 0 is refused."""

    HELLO = 1
    PROOF = 2
    BYE = 3
    PING = 4
    PONG = 5
    READY = 6
    PULL = 7
    DATA = 8
    COMMIT = 9
    ACK = 10
    CONFIRM = 11
    RELEASED = 12
    WITHDRAW = 13
    FAIL = 14
    STALE = 15


def failure_body(failure: Failure) -> dict[str, object]:
    """Cut to the bounds that the reader checks: a long reason must not end a link."""
    items = list(failure.fields.items())[:_MAX_FIELDS]
    return {
        "error": failure.error[:_MAX_ERROR_CHARS],
        "message": failure.message[:_MAX_MESSAGE_CHARS],
        "fields": {name[:_MAX_VALUE_CHARS]: value[:_MAX_VALUE_CHARS] for name, value in items},
    }


def parse_failure(fields: Fields) -> Failure:
    """Raises InvalidRequest."""
    return Failure(
        fields.text("error", max_chars=_MAX_ERROR_CHARS),
        fields.text("message", max_chars=_MAX_MESSAGE_CHARS),
        fields.text_map("fields", max_items=_MAX_FIELDS, max_chars=_MAX_VALUE_CHARS),
    )
