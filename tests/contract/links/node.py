"""One worker of the link contract's world."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from kv_transfer import messages
from kv_transfer.owner import TransferOwner
from kv_transfer.receiver import Receiver
from kv_transfer.transports.port import Network
from pdserve.engine.layout import KvLayout
from pdserve.ids import WorkerRef
from pdserve.kv_memory import ByteSpan
from tests.support.memories import StagedMemory

E = TypeVar("E")


@dataclass
class Node:
    """One worker: its transfer owner, and in place of its engine and loop what they were told."""

    ref: WorkerRef
    owner: TransferOwner
    network: Network
    memory: StagedMemory
    layout: KvLayout
    to_engine: list[object] = field(default_factory=list)
    to_loop: list[object] = field(default_factory=list)
    is_stopped: bool = False
    next_block: int = 0
    granted: dict[int, tuple[int, ...]] = field(default_factory=dict)
    is_gone: bool = False

    def block(self, block_id: int) -> bytes:
        return bytes(self.memory.at(self._span(block_id)))

    def fill(self, block_id: int, content: bytes) -> None:
        self.memory.at(self._span(block_id))[:] = content

    def _span(self, block_id: int) -> ByteSpan:
        return ByteSpan(block_id * self.layout.block_bytes, self.layout.block_bytes)

    def events(self, kind: type[E], lease_id: int | None = None) -> list[E]:
        """What the engine was told of this kind (about this lease)."""
        return [
            event
            for event in self.to_engine
            if isinstance(event, kind) and (lease_id is None or event.lease_id == lease_id)  # type: ignore[attr-defined]
        ]

    def ends(self, lease_id: int) -> list[object]:
        """Closing events of a lease: there must be exactly one in the end."""
        closing = (messages.HandedOff, messages.Retired, messages.LeaseClosed)
        return [
            event for event in self.to_engine if isinstance(event, closing) and event.lease_id == lease_id
        ]

    def is_pulling(self, lease_id: int) -> bool:
        """Whether it has asked for pieces of a lease that isn't over."""
        sides = [link.side for link in self.owner._links if isinstance(link.side, Receiver)]
        leases = [side.leases.get(lease_id) for side in sides]
        return any(lease is not None and lease.num_asked > 0 for lease in leases)

    def take_blocks(self, num_blocks: int) -> tuple[int, ...]:
        """Blocks nobody uses yet, scattered over the pool."""
        taken = range(self.next_block, self.next_block + num_blocks)
        self.next_block += num_blocks
        assert self.next_block <= self.layout.num_blocks
        return tuple(index * 37 % self.layout.num_blocks for index in taken)
