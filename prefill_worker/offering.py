"""Leases at the prefill worker: which blocks are offered to whom, and how long they must stay as they are.

A lease holds a reference of its own on every block it offered. It gives them back when the transfer owner has said
LeaseClosed, and not a moment earlier: until then their bytes may be on their way.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kv_transfer.messages import CommitLease, LeaseClosed, Offer, OpenLease, WithdrawLease
from pdserve.clock import Clock
from pdserve.engine.block_pool import BlockPool
from pdserve.errors import PdserveError
from pdserve.ids import AttemptName, WorkerRef
from pdserve.owner import Post
from pdserve.sampling import TokenLogprobs


@dataclass(slots=True)
class OfferedLease:
    """One lease as its prefill worker sees it.

    num_blocks, num_skip  of the whole prompt; those that the decode worker has already
    upto                  leading blocks offered or skipped so far
    num_unacked           blocks that count against its link, from the start of its prefill to the end of the lease
    """

    lease_id: int
    handle: int
    name: AttemptName
    decode_worker: WorkerRef
    num_blocks: int
    num_skip: int
    upto: int
    pinned: list[int] = field(default_factory=list)
    num_unacked: int = 0
    given_up: bool = False


class Offering:
    """All open leases of one prefill worker. Engine owner only."""

    def __init__(self, pool: BlockPool, to_transfer: Post, clock: Clock, hold_s: float) -> None:
        self._pool = pool
        self._to_transfer = to_transfer
        self._clock = clock
        self._hold_s = hold_s
        self._leases: dict[int, OfferedLease] = {}
        self._unacked: dict[WorkerRef, int] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, lease_id: int) -> bool:
        return lease_id in self._leases

    def open(self, lease: OfferedLease) -> None:
        """The attempt is accepted; the peer may end the lease from now on."""
        self._leases[lease.lease_id] = lease
        self._to_transfer(
            OpenLease(lease.lease_id, lease.decode_worker, lease.num_blocks, lease.num_skip, lease.name)
        )

    def may_begin(self, lease: OfferedLease) -> bool:
        """Whether its prefill may start: a slow decode worker may tie up a quarter of the pool, no more.

        On a link without un-acked blocks any prompt may start.
        """
        unacked = self._unacked.get(lease.decode_worker, 0)
        return unacked == 0 or 4 * (unacked + lease.num_blocks - lease.num_skip) <= self._pool.num_blocks

    def begin(self, lease: OfferedLease) -> None:
        """Its prefill starts: its blocks count against the link."""
        lease.num_unacked = lease.num_blocks - lease.num_skip
        self._unacked[lease.decode_worker] = self._unacked.get(lease.decode_worker, 0) + lease.num_unacked

    def offer(self, lease: OfferedLease, block_table: list[int], upto: int) -> None:
        """The first `upto` blocks of block_table are complete; says nothing if that is no news."""
        if lease.given_up or upto <= lease.upto:
            return
        block_ids = tuple(block_table[lease.upto : upto])
        self._pool.pin(block_ids)
        lease.pinned += block_ids
        lease.upto = upto
        self._to_transfer(Offer(lease.lease_id, upto, block_ids))

    def commit(self, lease: OfferedLease, first_token: int, logprobs: TokenLogprobs | None) -> None:
        """All is offered and the first token is sampled."""
        assert max(lease.upto, lease.num_skip) == lease.num_blocks, "commit before the last block"
        self._to_transfer(CommitLease(lease.lease_id, first_token, logprobs))

    def give_up(self, lease: OfferedLease, error: PdserveError) -> None:
        """This worker will not finish the lease; the decode worker is told. Idempotent; LeaseClosed still follows."""
        if not lease.given_up and lease.lease_id in self._leases:
            lease.given_up = True
            self._to_transfer(WithdrawLease(lease.lease_id, error))

    def close(self, closed: LeaseClosed) -> OfferedLease | None:
        """The transfer owner no longer reads its blocks: they may be reused. None for a lease that isn't open.

        Where the hand-off failed because the peer or the link was lost, full blocks are evicted last for a while,
        so that an attempt to another decode worker finds them.
        """
        lease = self._leases.pop(closed.lease_id, None)
        if lease is None:
            return None
        self._pool.release(lease.pinned, hold_until_s=self.hold_until_s if closed.link_lost else None)
        lease.pinned = []
        left = self._unacked.get(lease.decode_worker, 0) - lease.num_unacked
        if left > 0:
            self._unacked[lease.decode_worker] = left
        else:
            self._unacked.pop(lease.decode_worker, None)
        return lease

    @property
    def hold_until_s(self) -> float:
        """Until when blocks freed now are held."""
        return self._clock.now_s() + self._hold_s
