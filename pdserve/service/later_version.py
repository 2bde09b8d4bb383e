"""Reads messages of a peer that may be of a later version: what isn't known here is skipped, and counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from pdserve.messages import Hello, Welcome
from pdserve.wire_version import FIRST, WIRE_VERSION

R = TypeVar("R")

CountUnknown = Callable[[str, str], None]
"""One more message that wasn't known ("kind") or had fields that weren't ("field"), on this channel."""


class Tolerant(Generic[R]):
    """Reads the messages of one session, in their order.

    decode  gives None for a kind that isn't known
    Fields are looked at only after the peer has said that its version is later: that costs as much as parsing.
    """

    def __init__(self, decode: Callable[[Any], R | None], count: CountUnknown) -> None:
        self._decode = decode
        self._count = count
        self._is_later = False

    def __call__(self, msg: Any) -> R | None:
        """None: skip it. Raises InvalidRequest."""
        message = self._decode(msg)
        if message is None:
            self._count("session", "kind")
            return None
        if isinstance(message, Hello | Welcome):
            self._is_later = (message.wire or FIRST) > WIRE_VERSION
        if self._is_later and _has_unknown_fields(msg):
            self._count("session", "field")
        return message


def _has_unknown_fields(msg: Any) -> bool:
    num_bytes = msg.ByteSize()
    msg.DiscardUnknownFields()
    return bool(msg.ByteSize() != num_bytes)
