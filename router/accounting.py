"""What the router has sent a worker and the worker's reports don't show yet: load and credit between two reports.

A report tells the state after what the worker had read when it wrote it. An assignment is therefore counted on top
of the reports until the worker has answered something about it, and a report came after that answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from pdserve.messages import Load

RECENT_S = 10.0  # how fast the memory of recent assignments fades


@dataclass(slots=True)
class _Assigned:
    num_tokens: int
    num_blocks: int
    answered: bool = False


class Accounting:
    """Optimistic load of one worker. Event-loop thread only."""

    def __init__(self) -> None:
        self.load: Load | None = None
        self.rate_told_s = -math.inf  # when the worker's prefill rate was news
        self._assigned: dict[int, _Assigned] = {}  # by handle
        self._reported: dict[int, int] = {}  # handle -> tokens, of those that the reports count
        self._withdrawn: list[
            int
        ] = []  # tokens of these that the last report counts and that won't be computed
        self._recent = 0.0
        self._recent_at_s = 0.0

    def begin(self, recent: float, now_s: float) -> None:
        """With so many assignments, as others have had of late."""
        self._recent, self._recent_at_s = recent, now_s

    def assign(self, handle: int, num_tokens: int, num_blocks: int, now_s: float) -> None:
        """An attempt goes to this worker: tokens to prefill, blocks to hold."""
        self._assigned[handle] = _Assigned(num_tokens, num_blocks)
        self._recent = self.recent(now_s) + 1.0
        self._recent_at_s = now_s

    def answered(self, handle: int) -> None:
        """The worker has read the attempt's command; its next report counts it."""
        assigned = self._assigned.get(handle)
        if assigned is not None:
            assigned.answered = True

    def withdraw(self, handle: int) -> None:
        """Its prompt won't be finished here: what the last report says about it is ignored."""
        if handle in self._reported:
            self._withdrawn.append(self._reported.pop(handle))

    def drop(self, handle: int) -> None:
        """The attempt has ended."""
        self._assigned.pop(handle, None)
        self._reported.pop(handle, None)

    def report(self, load: Load, now_s: float) -> None:
        """The worker's own figures."""
        if self.load is None or load.prefill_tokens_per_s != self.load.prefill_tokens_per_s:
            self.rate_told_s = now_s
        self.load = load
        self._withdrawn = []
        self._reported |= {
            handle: each.num_tokens for handle, each in self._assigned.items() if each.answered
        }
        self._assigned = {handle: each for handle, each in self._assigned.items() if not each.answered}

    def recent(self, now_s: float) -> float:
        """Assignments of the last seconds, the older the less: spreads what comes one at a time."""
        return self._recent * math.exp((self._recent_at_s - now_s) / RECENT_S)

    @property
    def num_assigned(self) -> int:
        """Assignments that the worker's reports don't show yet."""
        return len(self._assigned)

    @property
    def num_sequences(self) -> int:
        """Running, waiting, and on their way."""
        reported = 0 if self.load is None else self.load.num_running + self.load.num_waiting
        return reported + len(self._assigned)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens queued there, and on their way."""
        reported = 0 if self.load is None else self.load.num_queued_tokens
        return self._queued(reported, lambda num_tokens: True)

    def num_tokens_before(self, num_tokens: int) -> int:
        """How many tokens are computed there before a prompt's own last ones, if it comes now with so many to compute.

        A worker's steps are halved between what is done in one chunk and what isn't (engine/scheduler.py); behind the
        step that is under way a short prompt meets, of the long ones, no more than of its own kind.
        """
        queued = self.num_queued_tokens
        if self.load is None or num_tokens > self.load.chunk_tokens:
            return queued
        chunk_tokens = self.load.chunk_tokens
        short = self._queued(self.load.num_queued_short_tokens, lambda tokens: tokens <= chunk_tokens)
        return short + min(queued - short, short + num_tokens + chunk_tokens)

    def _queued(self, reported: int, counts: Callable[[int], bool]) -> int:
        """What the last report says of some prompts, corrected by what this router knows beyond it."""
        gone = sum(num_tokens for num_tokens in self._withdrawn if counts(num_tokens))
        coming = sum(each.num_tokens for each in self._assigned.values() if counts(each.num_tokens))
        return max(0, reported - gone) + coming

    def num_free_blocks(self, num_blocks: int) -> int:
        """Blocks that a new grant could have, of a pool of num_blocks, as far as is known."""
        unreported = sum(each.num_blocks for each in self._assigned.values())
        if self.load is None:
            return num_blocks - unreported
        counts = self.load.blocks
        return counts.free + counts.cached - unreported


class Credit:
    """The balance of one session with a prefill worker, in prompt tokens. Event-loop thread only.

    The worker's balance is absolute and already lowered by what it has accepted; what the router holds for a
    placement, or has sent and had no answer to, is subtracted here.
    """

    def __init__(self) -> None:
        self.balance = 0
        self._held: dict[int, int] = {}  # handle -> prompt tokens

    @property
    def num_held(self) -> int:
        """Attempts that it is held for."""
        return len(self._held)

    @property
    def available(self) -> int:
        """May be spent on one more prompt of any size while above 0."""
        return self.balance - sum(self._held.values())

    def hold(self, handle: int, num_tokens: int) -> None:
        """Spend it on an attempt, from placement on."""
        self._held[handle] = num_tokens

    def release(self, handle: int) -> None:
        """The worker counts the attempt itself now, or the attempt has ended."""
        self._held.pop(handle, None)
