"""What several routers say of one cluster, put together. Pure.

Each router counts its own requests and hears every worker's reports. What nobody has said stays unknown: it is never
taken for an idle worker or an empty queue.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pdserve.figures import RouterFigures, Spread
from pdserve.messages import Role
from pdserve.status import ClusterStatus, WorkerStatus

QUEUE_PERCENTILE = 90
_WORST_FIRST = (
    "draining",
    "hung",
    "up",
)  # what one router calls draining drains, whatever the others have heard
_ROLES = {role.value: role for role in Role}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSeen:
    """One worker as its newest report has it.

    state      "up", "hung" or "draining"
    told       whether there is a report at all; without one the numbers mean nothing
    occupancy  part of its KV blocks that sequences hold; cached ones are free for the next
    tokens_per_s, step_s  0 = not known
    """

    id: str
    role: Role
    state: str
    told: bool
    num_running: int
    num_waiting: int
    num_queued_tokens: int
    tokens_per_s: float
    occupancy: float
    step_s: float
    slowest_step_s: float

    @property
    def ready(self) -> bool:
        """Whether it takes work."""
        return self.state == "up"

    @property
    def num_requests(self) -> int:
        """In its hands."""
        return self.num_running + self.num_waiting

    @property
    def load(self) -> tuple[bool, int, int, float]:
        """Compares workers of one role: what is least has the least to finish; one that is silent is never least."""
        return (not self.told, self.num_requests, self.num_queued_tokens, self.occupancy)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSeen:
    """The workers of one role, those that take work first of all."""

    workers: tuple[WorkerSeen, ...]

    @property
    def ready(self) -> tuple[WorkerSeen, ...]:
        return tuple(worker for worker in self.workers if worker.ready)

    @property
    def num_ready(self) -> int:
        return len(self.ready)

    @property
    def num_draining(self) -> int:
        return sum(worker.state == "draining" for worker in self.workers)

    @property
    def num_untold(self) -> int:
        """Of the ready ones: those that have not reported yet."""
        return sum(not worker.told for worker in self.ready)

    @property
    def num_requests(self) -> int:
        return sum(worker.num_requests for worker in self.ready)

    @property
    def num_waiting(self) -> int:
        return sum(worker.num_waiting for worker in self.ready)

    @property
    def num_queued_tokens(self) -> int:
        return sum(worker.num_queued_tokens for worker in self.ready)

    @property
    def tokens_per_s(self) -> float:
        """Of one worker, the mean of those that know theirs; 0 = none does."""
        return _mean(worker.tokens_per_s for worker in self.ready if worker.tokens_per_s > 0)

    @property
    def occupancy(self) -> float:
        """Mean of the ready ones that have reported."""
        return _mean(worker.occupancy for worker in self.ready if worker.told)

    @property
    def step_s(self) -> float:
        """Mean of those that run anything: what an idle worker remembers of its last steps is old."""
        return _mean(worker.step_s for worker in self.ready if worker.num_running)

    @property
    def slowest_step_s(self) -> float:
        return max((worker.slowest_step_s for worker in self.ready if worker.num_running), default=0.0)

    @property
    def num_unmeasured(self) -> int:
        """Workers that run something and don't say how long a step takes."""
        return sum(worker.num_running > 0 and worker.step_s <= 0 for worker in self.ready)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """The cluster at one moment, and what its routers counted since the last look.

    at_s              when, on the observer's clock
    complete          every router has answered, so that nothing can be hidden
    num_waiting       requests in the routers' queues, and the tokens of their prompts
    prompt_tokens_per_s  computed for requests that have ended since the last look; None = no two looks to compare
    queue_s           of requests placed since: 90 of 100 waited no longer; None = none was placed. ttft_s, gap_s alike
    """

    at_s: float
    complete: bool
    workers: tuple[WorkerSeen, ...]
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    prompt_tokens_per_s: float | None = None
    queue_s: float | None = None
    ttft_s: float | None = None
    gap_s: float | None = None

    def pool(self, role: Role) -> PoolSeen:
        """The workers of a role."""
        return PoolSeen(workers=tuple(worker for worker in self.workers if worker.role is role))

    def victims(self, role: Role) -> tuple[str, ...]:
        """The ids of a role's ready workers, in the order in which they may go: those with the least to do first."""
        ordered = sorted(self.pool(role).ready, key=lambda worker: (worker.load, _newest_first(worker.id)))
        return tuple(worker.id for worker in ordered)


Counted = Mapping[str, RouterFigures]
"""By router: what it had counted at the last look."""


def observe(
    at_s: float, answers: Sequence[ClusterStatus | None], counted: Counted
) -> tuple[Observed | None, Counted]:
    """One look, and what the next one is compared with; None: nobody has answered, so nothing is known.

    answers  of all routers; None = no answer
    """
    heard = [answer for answer in answers if answer is not None]
    if not heard:
        return None, counted
    now_counted = {answer.router_id: answer.figures for answer in heard}
    since = [(figures, counted[name]) for name, figures in now_counted.items() if name in counted]
    observed = Observed(
        at_s=at_s,
        complete=len(heard) == len(answers),
        workers=_workers(heard),
        num_waiting=sum(answer.queue.num_waiting for answer in heard),
        num_waiting_tokens=sum(answer.queue.num_waiting_tokens for answer in heard),
        prompt_tokens_per_s=_prompt_tokens_per_s(since),
        queue_s=_percentile([now.queued.since(then.queued) for now, then in since], QUEUE_PERCENTILE),
        ttft_s=_percentile([now.ttft.since(then.ttft) for now, then in since], QUEUE_PERCENTILE),
        gap_s=_percentile([now.gap.since(then.gap) for now, then in since], QUEUE_PERCENTILE),
    )
    return observed, {**counted, **now_counted}


def _workers(heard: Iterable[ClusterStatus]) -> tuple[WorkerSeen, ...]:
    """Each worker once, as the router with the newest incarnation of it, and the longest queue there, sees it."""
    seen: dict[str, list[WorkerStatus]] = {}
    for answer in heard:
        for worker in answer.workers:
            if worker.role in _ROLES:  # a later version may have more
                seen.setdefault(worker.id, []).append(worker)
    return tuple(_worker(views) for _, views in sorted(seen.items()))


def _worker(views: Sequence[WorkerStatus]) -> WorkerSeen:
    newest = max(_incarnation(view) for view in views)
    views = [view for view in views if _incarnation(view) == newest]
    fullest = max(views, key=lambda view: (_num_blocks(view), view.num_queued_tokens, view.num_running))
    blocks, num_blocks = fullest.blocks, _num_blocks(fullest)
    held = blocks.owned + blocks.granted + blocks.quarantined
    return WorkerSeen(
        id=fullest.id,
        role=_ROLES[fullest.role],
        state=min((_state(view) for view in views), key=_WORST_FIRST.index),
        told=num_blocks > 0,
        num_running=fullest.num_running,
        num_waiting=fullest.num_waiting,
        num_queued_tokens=fullest.num_queued_tokens,
        tokens_per_s=fullest.prefill_tokens_per_s,
        occupancy=held / num_blocks if num_blocks else 0.0,
        step_s=fullest.step_s,
        slowest_step_s=fullest.slowest_step_s,
    )


def _incarnation(view: WorkerStatus) -> tuple[str, int]:
    """Compares two that one worker id has had: by epoch (hexadecimal, of growing length), then by role generation."""
    return view.epoch.rjust(64, "0"), view.role_generation


def _state(view: WorkerStatus) -> str:
    """One that this version doesn't know is not of a worker that surely takes work."""
    return view.state if view.state in _WORST_FIRST else "hung"


def _num_blocks(view: WorkerStatus) -> int:
    blocks = view.blocks
    return blocks.free + blocks.granted + blocks.owned + blocks.cached + blocks.quarantined


def _prompt_tokens_per_s(since: Sequence[tuple[RouterFigures, RouterFigures]]) -> float | None:
    """Over all routers that neither began again nor were asked twice in one moment."""
    rates = [
        ((now.num_prompt_tokens - now.num_cached_tokens) - (then.num_prompt_tokens - then.num_cached_tokens))
        / (now.at_s - then.at_s)
        for now, then in since
        if now.at_s > then.at_s and now.num_prompt_tokens >= then.num_prompt_tokens
    ]
    return max(0.0, sum(rates)) if rates else None


def _percentile(spreads: Sequence[Spread], percent: float) -> float | None:
    """Of all routers' values together; those with other buckets than the first's stay out."""
    alike = [spread for spread in spreads if spread.bounds_s == spreads[0].bounds_s]
    if not alike:
        return None
    counts = tuple(sum(column) for column in zip(*(spread.counts for spread in alike), strict=True))
    return Spread(alike[0].bounds_s, counts).percentile(percent)


def _newest_first(worker_id: str) -> tuple[int, str]:
    """decode-10 before decode-9: of equals, the one that came last goes first."""
    digits = worker_id[len(worker_id.rstrip("0123456789")) :]
    return (-int(digits) if digits else 0, worker_id)


def _mean(values: Iterable[float]) -> float:
    listed = [value for value in values if math.isfinite(value)]
    return sum(listed) / len(listed) if listed else 0.0
