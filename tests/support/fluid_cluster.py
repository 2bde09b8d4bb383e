"""A cluster as a model of flows: prompts queue and are computed, sequences run, workers take a while to start.

What its routers would say of it is made as they make it (`ClusterStatus`), so that scaling can be tried over hours of
virtual time in milliseconds. Nothing of it is exact, and nothing of what is tried with it may need that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from deploy.scaling.decide import Decision, History, decide
from deploy.scaling.observe import Counted, observe
from deploy.scaling.targets import SCALED, Counts, ScalingTargets
from pdserve.block_messages import BlockCounts
from pdserve.figures import RouterFigures, Spread
from pdserve.messages import Role
from pdserve.status import ClusterStatus, QueueStatus, WorkerStatus

TICK_S = 0.1
TICKS = 10  # between two looks
BOUNDS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one worker can, and what one request asks for."""

    prefill_tokens_per_s: float = 4000.0
    prompt_tokens: int = 400
    answer_tokens: int = 100
    base_step_s: float = 0.02
    row_step_s: float = 0.002
    num_blocks: int = 1000
    start_s: float = 5.0


@dataclass
class Worker:
    id: str
    role: Role
    ready_s: float


class FluidCluster:
    """load: requests a second at a moment."""

    def __init__(self, targets: ScalingTargets, work: Work, load: Callable[[float], float]) -> None:
        self.targets, self.work, self.load = targets, work, load
        self.now_s = 0.0
        self.workers: list[Worker] = []
        self.counts = Counts(prefill=targets.prefill.least, decode=targets.decode.least)
        for role in SCALED:
            for _ in range(self.counts.of(role)):
                self._start(role, self.now_s)
        self.history = History()
        self.counted: Counted = {}
        self.queued_tokens = 0.0
        self.running = 0.0
        self.placed = 0.0  # requests, of which whole ones are counted
        self.computed_tokens = 0.0
        self.waits = [0] * (len(BOUNDS_S) + 1)
        self.decisions: list[Decision] = []
        self.trace: list[Counts] = []
        self.answers = True  # whether the router does

    def _start(self, role: Role, ready_s: float) -> None:
        taken = {worker.id for worker in self.workers}
        name = next(f"{role.value}-{n}" for n in range(99) if f"{role.value}-{n}" not in taken)
        self.workers.append(Worker(name, role, ready_s))

    def ready(self, role: Role) -> list[Worker]:
        return [worker for worker in self.workers if worker.role is role and worker.ready_s <= self.now_s]

    @property
    def step_s(self) -> float:
        num_ready = max(1, len(self.ready(Role.DECODE)))
        return self.work.base_step_s + self.work.row_step_s * self.running / num_ready

    @property
    def queue_s(self) -> float:
        return self.queued_tokens / (self.work.prefill_tokens_per_s * max(1, len(self.ready(Role.PREFILL))))

    @property
    def kept(self) -> bool:
        """Whether both targets are kept now."""
        how = self.targets.how
        return self.queue_s <= how.ttft_target_s and self.step_s <= how.itl_target_s

    def second(self) -> None:
        """A second passes, then scaling looks."""
        for _ in range(TICKS):
            self._tick()
        self._look()

    def _tick(self) -> None:
        work = self.work
        self.now_s += TICK_S
        self.queued_tokens += self.load(self.now_s) * work.prompt_tokens * TICK_S
        able = len(self.ready(Role.PREFILL)) * work.prefill_tokens_per_s * TICK_S
        done = min(self.queued_tokens, able)
        self.placed += done / work.prompt_tokens
        self.waits[sum(bound < self.queue_s for bound in BOUNDS_S)] += int(self.placed)
        self.placed -= int(self.placed)
        self.queued_tokens -= done
        self.running += done / work.prompt_tokens
        ended = min(self.running, self.running * TICK_S / (work.answer_tokens * self.step_s))
        self.running -= ended
        self.computed_tokens += ended * work.prompt_tokens

    def run(self, seconds: int) -> FluidCluster:
        for _ in range(seconds):
            self.second()
        return self

    def _look(self) -> None:
        seen, self.counted = observe(self.now_s, [self.status() if self.answers else None], self.counted)
        if seen is None:
            self.history = self.history.blind()
            return
        decision, self.history = decide(seen, self.counts, self.targets, self.history)
        self.decisions.append(decision)
        for change in decision.set_roles:
            worker = next(each for each in self.workers if each.id == change.worker_id)
            worker.role, worker.ready_s = change.role, self.now_s + 1.0
        for role in SCALED:
            mine = [worker for worker in self.workers if worker.role is role]
            for _ in range(decision.counts.of(role) - len(mine)):
                self._start(role, self.now_s + self.work.start_s)
            order = {name: place for place, name in enumerate(seen.victims(role), 1)}
            mine.sort(key=lambda worker: order.get(worker.id, 0))
            for worker in mine[: max(0, len(mine) - decision.counts.of(role))]:
                self.workers.remove(worker)
        self.counts = decision.counts
        self.trace.append(self.counts)

    def status(self) -> ClusterStatus:
        """What its router would say."""
        work, prefill, decode = self.work, self.ready(Role.PREFILL), self.ready(Role.DECODE)
        at_workers = min(self.queued_tokens, 16_384.0 * len(prefill))
        workers = [
            _status(worker, work, queued=at_workers / len(prefill), running=0.0, step_s=0.05)
            for worker in prefill
        ] + [
            _status(worker, work, queued=0.0, running=self.running / len(decode), step_s=self.step_s)
            for worker in decode
        ]
        outside = self.queued_tokens - at_workers
        return ClusterStatus(
            router_id="r",
            draining=False,
            workers=tuple(workers),
            pairs=(),
            queue=QueueStatus(
                num_waiting=round(outside / work.prompt_tokens),
                num_waiting_tokens=round(outside),
                num_running=0,
                limit=1024,
            ),
            figures=RouterFigures(
                at_s=self.now_s,
                num_prompt_tokens=round(self.computed_tokens),
                queued=Spread(BOUNDS_S, tuple(self.waits)),
            ),
        )


def _status(worker: Worker, work: Work, *, queued: float, running: float, step_s: float) -> WorkerStatus:
    blocks_of_one = (work.prompt_tokens + work.answer_tokens / 2) / 16
    owned = min(work.num_blocks, round(running * blocks_of_one))
    prefills = worker.role is Role.PREFILL
    return WorkerStatus(
        id=worker.id,
        role=worker.role.value,
        epoch="1.0000000000000001",
        role_generation=1,
        state="up",
        blocks=BlockCounts(work.num_blocks - owned, 0, owned, 0, 0),
        num_running=round(running),
        num_waiting=round(queued / work.prompt_tokens),
        num_queued_tokens=round(queued),
        num_cache_hit_tokens=0,
        num_cache_query_tokens=0,
        metrics_address="",
        numerics="",
        num_steps=1,
        prefill_tokens_per_s=work.prefill_tokens_per_s if prefills else 0.0,
        step_s=step_s,
        slowest_step_s=step_s,
    )


def reversals(trace: list[int]) -> int:
    """How often a number that had risen fell, or one that had fallen rose."""
    moves = [after > before for before, after in pairwise(trace) if before != after]
    return sum(first != second for first, second in pairwise(moves))
