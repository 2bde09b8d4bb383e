"""A few children that do jobs of one kind, with limits: time, memory, how many run and how many wait."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum

import structlog

from pdserve.children.fair_places import FairPlaces
from pdserve.children.frames import Crashed, Done, Exited, Job, JobOrder, JobRefused, Outcome, OutOfMemory
from pdserve.children.metrics import ChildMetrics
from pdserve.children.server_process import ChildLost, ForeignChild, ServerProcess
from pdserve.clock import Clock
from pdserve.errors import Failure, Incompatible, Overloaded, from_failure

log = structlog.get_logger()

_TIRED_SHARE = 4  # a child that has kept a quarter of its memory from jobs gone by is replaced
_MOST_LOSSES = 2  # of one job, to signals that aren't ours
_CPU_TICK_S = 0.02  # the kernel counts in hundredths
_MOST_WORDS = 200
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class End(Enum):
    """How a job ended that has no outcome of its own. `value`: in metrics and logs."""

    TIME = "time"
    MEMORY = "memory"
    CRASH = "crash"
    LOST = "lost"


class JobEnded(Exception):
    """The child is gone, or knows nothing. words: the last it said."""

    def __init__(self, end: End, words: str = "") -> None:
        super().__init__(end.value, words)
        self.end = end
        self.words = words


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLimits:
    """num_children: at once; most_waiting: jobs that may wait for one; niceness: of the children, 0 to 19."""

    num_children: int
    most_waiting: int
    memory_bytes: int
    niceness: int = 0


class Pool:
    """Event loop only. name: of its kind of job, in metrics and logs."""

    def __init__(
        self, server: ServerProcess, name: str, limits: PoolLimits, metrics: ChildMetrics, clock: Clock
    ) -> None:
        self._server = server
        self._name = name
        self._limits = limits
        self._metrics = metrics
        self._clock = clock
        self._idle: dict[int, ForeignChild] = {}
        self._num_running = 0
        self._waiting = FairPlaces(limits.most_waiting, name)
        self._closed = False

    async def warm_up(self) -> None:
        """Have all children ready. Raises Incompatible if there can be none."""
        await self._server.ready()
        while len(self._idle) + self._num_running < self._limits.num_children:
            self._add_idle()

    def close(self) -> None:
        """Children that are idle end; those at work are their callers' to cancel."""
        self._closed = True
        for child in self._idle.values():
            child.close()
        self._idle.clear()

    async def run(self, job: Job, user: str, limit_s: float, cpu_s: float | None = None) -> Done:
        """Have a job done by a child that does nothing else meanwhile.

        user     whose turn it takes
        limit_s  from when it has the child; then that is killed
        cpu_s    and what it may compute: on a busy machine, that takes longer than so long
        Raises JobEnded; Overloaded if too many wait; Incompatible if there can be no children; and the job's own
        error. Cancelled: the child is killed.
        """
        await self._server.ready()
        await self._take_place(user)
        try:
            for _ in range(_MOST_LOSSES):
                try:
                    return _result(await self._run_in_child(job, limit_s, cpu_s))
                except JobEnded as ended:
                    self._metrics.kills.labels(kind=self._name, reason=ended.end.value).inc()
                    log.info("child.ended", kind=self._name, reason=ended.end.value, words=ended.words)
                    if ended.end is not End.LOST:
                        raise
            raise JobEnded(End.LOST)
        finally:
            self._leave_place()

    async def _run_in_child(self, job: Job, limit_s: float, cpu_s: float | None) -> Outcome:
        child = self._idle.popitem()[1] if self._idle else self._fork()
        begun_s = self._clock.now_s()
        sound = False
        try:
            async with asyncio.timeout(limit_s) as limit, _watched(child, cpu_s, limit):
                answer = await child.ask(JobOrder(job, limit_s))
            sound = answer.grown_bytes * _TIRED_SHARE < self._limits.memory_bytes
            return answer.outcome
        except TimeoutError:
            raise JobEnded(End.TIME) from None
        except ChildLost as lost:
            raise _ended(lost.exited) from None
        except asyncio.CancelledError:
            self._metrics.kills.labels(kind=self._name, reason="cancelled").inc()
            raise
        finally:
            self._metrics.seconds.labels(kind=self._name).observe(self._clock.now_s() - begun_s)
            if sound and not self._closed:
                self._idle[child.number] = child
            else:
                child.kill()
                self._add_idle()

    def _fork(self) -> ForeignChild:
        child = self._server.fork(self._limits.memory_bytes, self._limits.niceness)
        self._metrics.children.labels(kind=self._name).inc()
        child.exited.add_done_callback(lambda _: self._on_exit(child))
        return child

    def _add_idle(self) -> None:
        if self._closed:
            return
        try:
            child = self._fork()
        except Incompatible as error:
            log.error("child.not_forked", kind=self._name, reason=str(error))
        else:
            self._idle[child.number] = child

    def _on_exit(self, child: ForeignChild) -> None:
        self._metrics.children.labels(kind=self._name).dec()
        self._idle.pop(child.number, None)  # killed from outside: the next job forks another

    # --- places

    async def _take_place(self, user: str) -> None:
        if self._num_running < self._limits.num_children:
            self._num_running += 1
            return
        waiting = self._metrics.waiting.labels(kind=self._name)
        waiting.inc()
        try:
            await self._its_turn(user)
        except Overloaded:
            self._metrics.refused.labels(kind=self._name).inc()
            raise
        finally:
            waiting.dec()

    async def _its_turn(self, user: str) -> None:
        place = self._waiting.wait(user)
        try:
            await place  # handed over by the one who leaves it
        except asyncio.CancelledError:
            if not place.cancelled() and place.exception() is None:
                self._leave_place()  # it had been handed over
            raise

    def _leave_place(self) -> None:
        if not self._waiting.call_next():
            self._num_running -= 1


@asynccontextmanager
async def _watched(child: ForeignChild, cpu_s: float | None, limit: asyncio.Timeout) -> AsyncIterator[None]:
    """Let the limit pass once the child has computed for so long."""
    loop = asyncio.get_running_loop()
    begun_s = child.cpu_s
    timer: asyncio.TimerHandle | None = None

    def look(after_s: float) -> None:
        nonlocal timer
        left_s = after_s - (child.cpu_s - begun_s)
        if left_s > _CPU_TICK_S:
            timer = loop.call_later(left_s, look, after_s)
        else:
            limit.reschedule(loop.time())

    if cpu_s is not None:
        timer = loop.call_later(cpu_s, look, cpu_s)
    try:
        yield
    finally:
        if timer is not None:
            timer.cancel()


def _result(outcome: Outcome) -> Done:
    match outcome:
        case JobRefused(error, message, fields):
            raise from_failure(Failure(error, message, fields))
        case OutOfMemory():
            raise JobEnded(End.MEMORY)
        case Crashed(words):
            raise JobEnded(End.CRASH, words)
    return outcome


def _ended(exited: Exited | None) -> JobEnded:
    if exited is None:
        return JobEnded(End.LOST)
    if exited.signal == signal.SIGXCPU:
        return JobEnded(End.TIME)
    if "memory allocation of" in exited.words or "MemoryError" in exited.words:
        return JobEnded(End.MEMORY)  # what the library says when it may not have more, before it aborts
    if exited.signal in _FROM_OUTSIDE:
        return JobEnded(End.LOST)
    return JobEnded(End.CRASH, exited.words[-_MOST_WORDS:] or f"signal {exited.signal}")
