"""Who gets blocks next, and whose grant goes when blocks are short."""

from __future__ import annotations

from decode_worker.attempt import DecodeAttempt, DecodeState
from decode_worker.grants import Grant, Grants
from decode_worker.waiting import WaitingList
from pdserve.engine.engine import Engine
from pdserve.messages import Granted

# A grant is taken back so many tokens before its blocks are needed.
_ROOM_AHEAD_TOKENS = 2


class GrantQueue:
    """The waiting list in front of the grants. Engine owner only."""

    def __init__(self, engine: Engine, grants: Grants, max_waiting: int) -> None:
        self._engine = engine
        self._grants = grants
        self._waiting = WaitingList(max_waiting)
        self._failed_pass: tuple[object, ...] | None = None
        self.num_hit_tokens = 0
        self.num_query_tokens = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def is_over_bound(self) -> bool:
        """Whether the newest one must be refused."""
        return self._waiting.is_over_bound

    def waiting(self) -> list[DecodeAttempt]:
        """Those that wait, the next one first."""
        return self._waiting.in_order()

    def add(self, attempt: DecodeAttempt) -> None:
        """It waits from now on, maybe only until the next `grant`."""
        self._waiting.add(attempt)
        self._failed_pass = None

    def remove(self, attempt: DecodeAttempt) -> None:
        """It no longer waits, if it did. Something has ended, so others may be let in."""
        self._waiting.remove(attempt)
        self._failed_pass = None

    def grant(self, now_s: float) -> list[tuple[DecodeAttempt, Granted]]:
        """Let in what fits, in the waiting list's order; the answers to be given.

        Asks the pool again only when something has changed since it last said no.
        """
        if not self.num_waiting or self._situation(now_s) == self._failed_pass:
            return []
        granted: list[tuple[DecodeAttempt, Granted]] = []
        while (let_in := self._let_one_in(now_s)) is not None:
            granted.append(let_in)
        self._failed_pass = self._situation(now_s)
        return granted

    def news_of_places(self) -> list[tuple[DecodeAttempt, int]]:
        """(attempt, place) of all whose place isn't what their router was last told."""
        changed: list[tuple[DecodeAttempt, int]] = []
        for place, attempt in enumerate(self._waiting.in_order()):
            if attempt.last_place != place:
                attempt.last_place = place
                changed.append((attempt, place))
        return changed

    def revocable_ahead(self) -> Grant | None:
        """The grant to revoke before running sequences need its blocks, if there is need; ask until None.

        Its blocks come back only with Retired: asked for in the moment of need they would be too late and cost a
        running sequence its place. And where nothing runs because preempted sequences can't come back, grants must
        give way: they count as the youngest.
        """
        pool = self._engine.pool
        if not self._grants.num_live:
            return None
        num_short = sum(
            1
            for seq in self._engine.sequences
            if 0 < len(seq.block_table) * pool.block_size < len(seq.ids) + _ROOM_AHEAD_TOKENS
        )
        returning = self._grants.num_returning
        stalled = self._engine.num_preempted > 0 and not self._engine.has_work and returning == 0
        if stalled or num_short > pool.available + returning:
            return self._grants.youngest_revocable()
        return None

    def _let_one_in(self, now_s: float) -> tuple[DecodeAttempt, Granted] | None:
        for attempt in self._waiting.in_need_of_nothing() or self._waiting.candidates(now_s):
            granted = self._try(attempt, now_s)
            if granted is not None:
                return attempt, granted
        return None

    def _try(self, attempt: DecodeAttempt, now_s: float) -> Granted | None:
        if not self._grants.fits(attempt):
            return None
        seq = attempt.seq
        if attempt.source is None:
            if not self._engine.reserve_prefill(seq, then_decode=True):
                return None
            self._engine.start_prefill(seq, then_decode=True)
            # No lease: nothing will come over a link.
            granted = Granted(attempt.handle, 0, seq.num_cached_tokens // self._engine.pool.block_size)
            attempt.move(DecodeState.ACTIVE, now_s)
        else:
            grant = self._grants.give(attempt)
            granted = Granted(attempt.handle, grant.lease_id, len(grant.hits))
            self.num_query_tokens += len(seq.ids)
            self.num_hit_tokens += len(grant.hits) * self._engine.pool.block_size
            attempt.move(DecodeState.GRANTED, now_s)
        attempt.admitted_s = now_s
        self._waiting.remove(attempt)
        return granted

    def _situation(self, now_s: float) -> tuple[object, ...]:
        """What the answer to those that wait depends on."""
        engine = self._engine
        candidates = self._waiting.candidates(now_s)
        return (
            engine.pool.available,
            engine.num_preempted,
            len(engine.sequences),
            self._grants.num_live,
            len(candidates),
            candidates[0] if candidates else None,
        )
