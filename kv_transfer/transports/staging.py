"""Pinned memory through which pieces go whose pool the host can't see: slots of one size, as many as were configured.

A link has one slot whenever it needs one, whatever the others hold: there are `max_links` at least, and nobody takes
a second one while fewer are free than links hold none. What can't be held waits where it is: at P in the pool, at D in
the connection.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

from xxhash import xxh3_64_intdigest

from kv_transfer.frames import MAX_PIECE_BYTES
from kv_transfer.transports.device_copies import DeviceCopies
from kv_transfer.transports.staging_port import HostCopies
from pdserve.clock import Clock
from pdserve.errors import Incompatible, InvariantViolated
from pdserve.kv_memory import XXH3_64, ByteSpan, KvMemory


class StagedPool:
    """The pool of a device as links see it, a KvMemory: behind its end lie the slots, which are the host's.

    landed  what the host has of a piece that has arrived, by where in the pool it goes
    """

    checksums = (XXH3_64,)

    def __init__(self, pool: KvMemory, slots: memoryview) -> None:
        self.num_bytes = pool.num_bytes
        self.device = pool.device
        self.landed: dict[ByteSpan, ByteSpan] = {}
        self._pool = pool
        self._slots = slots

    def view(self, span: ByteSpan) -> memoryview:
        if span.start < self.num_bytes:
            raise InvariantViolated(
                "the host can't see the memory of a device", span=span, device=self.device
            )
        return self._slots[span.start - self.num_bytes : span.end - self.num_bytes]

    def address(self, span: ByteSpan) -> int:
        return self._pool.address(span)

    def checksum(self, kind: str, span: ByteSpan) -> int | None:
        if kind != XXH3_64:
            raise InvariantViolated("a checksum that this memory doesn't offer", kind=kind)
        seen = span if span.start >= self.num_bytes else self.landed.get(span)
        return None if seen is None else xxh3_64_intdigest(self.view(seen))

    def populate(self, end: int) -> bool:
        return self._pool.populate(end)

    def export(self, transport: str) -> int | None:
        return self._pool.export(transport)


class Staging:
    """The slots of one worker, and the copies to and from them. Transfer owner only.

    memory  is what the links, and the network below, move spans of
    Making one raises Incompatible if there are too few slots, and WorkerLost if memory can't be pinned.
    """

    def __init__(
        self,
        copies: HostCopies,
        pool: KvMemory,
        *,
        block_bytes: int,
        staging_bytes: int,
        max_links: int,
        clock: Clock,
        lease_s: float,
    ) -> None:
        self.slot_bytes = min(block_bytes, MAX_PIECE_BYTES)
        num_slots = staging_bytes // self.slot_bytes
        if num_slots < max_links:
            raise Incompatible(
                "transport.staging_bytes must hold a piece for each of worker.max_links",
                staging_bytes=staging_bytes,
                want=max_links * self.slot_bytes,
            )
        self.memory = StagedPool(pool, copies.pin(num_slots * self.slot_bytes))
        self._copies = copies
        self._under_way = DeviceCopies(copies, "a copy to or from the host", clock=clock, lease_s=lease_s)
        self._clock = clock
        self._max_links = max_links
        self._num_slots = num_slots
        self._free = list(range(num_slots))
        self._held: Counter[object] = Counter()
        self._was_refused = False
        self._has_news = False

    @property
    def used_bytes(self) -> int:
        """Any thread."""
        return (self._num_slots - len(self._free)) * self.slot_bytes

    @property
    def num_pending(self) -> int:
        """Copies under way. Any thread."""
        return self._under_way.num_pending

    # --- slots

    def room(self, who: object) -> int:
        """How many slots it may take now. If none, `next_due_s` says when it is worth asking again."""
        has_some = who in self._held
        num_others_first = max(0, self._max_links - len(self._held) - (not has_some))
        room = max(not has_some and len(self._free) > 0, len(self._free) - num_others_first)
        self._was_refused = self._was_refused or room == 0
        return room

    def take(self, who: object, num_bytes: int) -> ByteSpan:
        """The first bytes of a slot. Only if there is `room`."""
        self._held[who] += 1
        return ByteSpan(self.memory.num_bytes + self._free.pop() * self.slot_bytes, num_bytes)

    def give_back(self, who: object, slot: ByteSpan) -> None:
        """Neither a copy nor a connection touches it any longer."""
        self._free.append((slot.start - self.memory.num_bytes) // self.slot_bytes)
        self._held[who] -= 1
        if not self._held[who]:
            del self._held[who]
        self._has_news = self._was_refused

    # --- copies

    def fetch(self, span: ByteSpan, slot: ByteSpan, told: Callable[[], None]) -> None:
        """From the pool. told: when it is over, also after it has raised WorkerLost: not all could be begun."""
        self._under_way.begin(partial(self._copies.fetch, span, slot.start - self.memory.num_bytes), told)

    def store(self, slot: ByteSpan, into: ByteSpan, told: Callable[[], None]) -> None:
        """Into the pool. told: as of `fetch`."""
        self._under_way.begin(partial(self._copies.store, slot.start - self.memory.num_bytes, into), told)

    def poll(self) -> None:
        """See what is done. Raises InvariantViolated when the device can't be trusted with memory any longer."""
        self._was_refused = self._has_news = False
        self._under_way.poll()

    def next_due_s(self) -> float | None:
        return self.now_s() if self._has_news else self._under_way.next_due_s()

    def now_s(self) -> float:
        return self._clock.now_s()
