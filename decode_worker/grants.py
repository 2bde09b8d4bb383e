"""Grants: blocks for the KV of one attempt each, the sequence's own after the hand-off.

    give ─► GRANTED ──HandedOff──► adopted (OWNED)
               │
               └── end ─► Retired ─► FREE, or QUARANTINED ─► LeaseReleased ─► FREE

The transfer owner alone writes GRANTED blocks; they leave that state only when it has said HandedOff or Retired.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from decode_worker.attempt import DecodeAttempt
from kv_transfer.messages import EndLease, ExpectLease, PullProgress, Retired
from pdserve.engine.block_pool import BlockState
from pdserve.engine.engine import Engine
from pdserve.errors import InvariantViolated, PdserveError
from pdserve.ids import Random, WorkerRef, draw_id64
from pdserve.owner import Post


@dataclass(slots=True, eq=False)
class Grant:
    """One lease as its decode worker sees it.

    hits          pinned blocks that the prefill worker will not send
    block_ids     the blocks of the rest, the one of the first decoded token included; none if nothing will be decoded
    num_expected  of those, the leading ones whose KV comes over the link
    ended         by this side: EndLease is sent, Retired (or HandedOff) still comes
    """

    lease_id: int
    attempt: DecodeAttempt
    source: WorkerRef
    hits: list[int]
    block_ids: list[int]
    num_expected: int
    num_received: int = 0
    ended: bool = False

    @property
    def is_committed(self) -> bool:
        """Whether all its KV is here, so that it may be ACKed at any moment, or has been: too late to revoke it."""
        return self.num_expected > 0 and self.num_received >= self.num_expected


class Grants:
    """All grants of one decode worker, until the end of their leases. Engine owner only."""

    def __init__(self, engine: Engine, to_transfer: Post, random: Random) -> None:
        self._engine = engine
        self._pool = engine.pool
        self._to_transfer = to_transfer
        self._random = random
        self._grants: dict[int, Grant] = {}  # in the order in which they were given
        self._quarantined: dict[int, Grant] = {}
        self.num_granted_blocks = 0
        self.num_quarantined_blocks = 0

    def __len__(self) -> int:
        """Leases that aren't over, quarantines included."""
        return len(self._grants) + len(self._quarantined)

    @property
    def live(self) -> Iterator[Grant]:
        """Those that may still become sequences, oldest first."""
        return (grant for grant in self._grants.values() if not grant.ended)

    @property
    def num_live(self) -> int:
        """Of them, those that hold anything."""
        return sum(1 for grant in self.live if grant.block_ids)

    @property
    def num_returning(self) -> int:
        """Blocks of ended leases that come back with Retired."""
        return sum(len(grant.block_ids) for grant in self._grants.values() if grant.ended)

    def of(self, attempt: DecodeAttempt) -> Grant | None:
        """The live grant of an attempt."""
        return next((grant for grant in self.live if grant.attempt is attempt), None)

    def fits(self, attempt: DecodeAttempt) -> bool:
        """Whether the attempt may have its blocks now (docs: architecture, "Admission").

        Preempted sequences come first; there must be a row for it in the batch, and a block to grow for all that
        run; and after it the oldest sequence could still grow to its end with all younger ones preempted and all
        uncommitted grants revoked. Blocks that revocation can't free at once are those of committed grants and the
        quarantined ones.
        """
        engine = self._engine
        if attempt.ends_there:
            return True
        if engine.num_preempted:
            return False
        sequences = engine.sequences
        if len(sequences) + self.num_live >= engine.limits.max_batch:
            return False
        hits = self._hits(attempt)
        if not self._pool.fits(hits, self._num_needed(attempt, hits) + len(sequences)):
            return False
        oldest = engine.oldest
        if oldest is None:
            return True
        num_final = self._num_blocks_for(oldest.num_prompt_tokens + oldest.key.max_tokens)
        return num_final <= self._pool.num_blocks - self._num_beyond_revocation()

    def give(self, attempt: DecodeAttempt) -> Grant:
        """Take the blocks and tell the transfer owner what will come into them. Only after `fits`."""
        assert attempt.source is not None, "no lease without a source"
        hits: list[int] = []
        num_needed = num_expected = 0
        if not attempt.ends_there:
            hits = self._hits(attempt)
            num_needed = self._num_needed(attempt, hits)
            num_expected = self._num_blocks_for(len(attempt.seq.ids)) - len(hits)
        self._pool.pin(hits)
        block_ids = self._pool.grant(num_needed)
        if block_ids is None:
            raise InvariantViolated("fits() said yes", num_needed=num_needed, available=self._pool.available)
        grant = Grant(
            lease_id=draw_id64(self._random),
            attempt=attempt,
            source=attempt.source,
            hits=hits,
            block_ids=block_ids,
            num_expected=num_expected,
        )
        self._grants[grant.lease_id] = grant
        self.num_granted_blocks += len(block_ids)
        expected = tuple(block_ids[: grant.num_expected])
        self._to_transfer(ExpectLease(grant.lease_id, grant.source, len(hits), expected, attempt.name))
        return grant

    def note_progress(self, progress: PullProgress) -> None:
        """More of it is here, or its link moved; if it isn't live that means nothing."""
        grant = self._grants.get(progress.lease_id)
        if grant is not None and not grant.ended:
            grant.num_received = progress.num_received
            grant.attempt.pull_progress = progress.num_received + progress.num_waits

    def end(self, grant: Grant, error: PdserveError) -> None:
        """This side ends it: its blocks are free when Retired comes. Idempotent."""
        if grant.ended:
            return
        grant.ended = True
        self._pool.release(grant.hits)
        grant.hits = []
        self._to_transfer(EndLease(grant.lease_id, error))

    def adopt(self, lease_id: int) -> Grant | None:
        """The hand-off is confirmed: the blocks become the sequence's. None if this side had ended the lease."""
        grant = self._take(lease_id)
        if grant.ended:
            self._pool.free_granted(grant.block_ids)
            return None
        self._pool.adopt(grant.block_ids)
        return grant

    def retire(self, retired: Retired) -> Grant:
        """The transfer owner is done with a lease that wasn't handed off."""
        grant = self._take(retired.lease_id)
        if not grant.ended:
            self._pool.release(grant.hits)
        if retired.quarantine:
            self._pool.quarantine_granted(grant.block_ids)
            self._quarantined[grant.lease_id] = grant
            self.num_quarantined_blocks += len(grant.block_ids)
        else:
            self._pool.free_granted(grant.block_ids)
        return grant

    def release_quarantined(self, lease_id: int) -> None:
        """Nobody can touch them any longer."""
        grant = self._quarantined.pop(lease_id, None)
        if grant is not None:
            self.num_quarantined_blocks -= len(grant.block_ids)
            self._pool.release_quarantined(grant.block_ids)

    def youngest_revocable(self) -> Grant | None:
        """The grant to take back first."""
        revocable = [grant for grant in self.live if grant.block_ids and not grant.is_committed]
        return revocable[-1] if revocable else None

    def _take(self, lease_id: int) -> Grant:
        grant = self._grants.pop(lease_id, None)
        if grant is None:
            raise InvariantViolated("a lease that was never granted, or is over", lease=lease_id)
        self.num_granted_blocks -= len(grant.block_ids)
        return grant

    def held_blocks(self) -> dict[BlockState, dict[int, int | None]]:
        """The blocks of all leases by the state that they must be in; pinned hits are OWNED."""
        held: dict[BlockState, dict[int, int | None]] = {
            BlockState.GRANTED: {},
            BlockState.OWNED: {},
            BlockState.QUARANTINED: {},
        }
        for grant in self._grants.values():
            handle = None if grant.ended else grant.attempt.handle
            held[BlockState.GRANTED] |= dict.fromkeys(grant.block_ids, handle)
            held[BlockState.OWNED] |= dict.fromkeys(grant.hits, handle)
        for grant in self._quarantined.values():
            held[BlockState.QUARANTINED] |= dict.fromkeys(grant.block_ids)
        return held

    def _hits(self, attempt: DecodeAttempt) -> list[int]:
        """All full blocks may be hits if the logits are made elsewhere; else one token is left to compute."""
        hits = self._engine.find_hits(attempt.seq)
        if attempt.source is not None:
            return hits
        return hits[: (len(attempt.seq.ids) - 1) // self._pool.block_size]

    def _num_needed(self, attempt: DecodeAttempt, hits: list[int]) -> int:
        return self._num_blocks_for(len(attempt.seq.ids) + 1) - len(hits)

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._pool.block_size)

    def _num_beyond_revocation(self) -> int:
        committed = sum(len(grant.block_ids) + len(grant.hits) for grant in self.live if grant.is_committed)
        return committed + self._pool.counts().quarantined
