"""Copies between pinned memory and a pool that several devices have parts of: each by its own stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kv_transfer.transports.staging_port import HostCopies
from pdserve.engine.parallel.parted_pool import PartedPool
from pdserve.kv_memory import ByteSpan


class PartCopies(HostCopies, Protocol):
    """Of one device among several, all of which copy to and from the same pinned memory."""

    def share(self, pinned: memoryview) -> None:
        """What another one's `pin` gave, in place of its own. Once."""
        ...


class PartedCopies:
    """HostCopies (kv_transfer/transports/staging_port.py) for a `PartedPool`. A copy that fails in the middle is one of
    which a part has begun, which whoever asks for it reckons with."""

    def __init__(self, pool: PartedPool, copies: Sequence[PartCopies]) -> None:
        """copies: of all ranks' devices, in order."""
        self._pool = pool
        self._copies = copies
        self._events: dict[int, list[tuple[PartCopies, int]]] = {}
        self._num_events = 0

    def pin(self, num_bytes: int) -> memoryview:
        first, *others = self._copies
        pinned = first.pin(num_bytes)
        for each in others:
            each.share(pinned)
        return pinned

    def fetch(self, span: ByteSpan, into: int) -> None:
        for offset, own, part in self._pool.pieces(span):
            self._copies[self._pool.holders[part][0]].fetch(own, into + offset)

    def store(self, start: int, into: ByteSpan) -> None:
        for offset, own, part in self._pool.pieces(into):
            for rank in self._pool.holders[part]:
                self._copies[rank].store(start + offset, own)

    def record(self) -> int:
        self._num_events += 1
        self._events[self._num_events] = [(each, each.record()) for each in self._copies]
        return self._num_events

    def is_over(self, event: int) -> bool:
        left = [(copies, own) for copies, own in self._events[event] if not copies.is_over(own)]
        if left:
            self._events[event] = left
        else:
            del self._events[event]
        return not left
