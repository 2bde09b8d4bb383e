"""Two lanes for one kind of job: each is tried for a moment; one that needs longer begins again in a child of its own.

So a few that never end hold up neither the usual ones nor, as the children of the slow lane are nice, those who are
served; and, as users come in turn, many of one user's hold up another's by one. What passed a limit is remembered for a
while by its content, and refused without another try.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable

from pdserve.children.frames import Done, Job
from pdserve.children.metrics import ChildMetrics
from pdserve.children.pool import End, JobEnded, Pool, PoolLimits
from pdserve.children.server_process import ServerProcess
from pdserve.clock import Clock
from pdserve.errors import Failure, InvalidRequest, Overloaded, PdserveError, from_failure, to_failure

QUICK_CPU_S = 0.25  # nearly all take much less
HOPELESS_S = 60.0
_MOST_HOPELESS = 1024
_MOST_WAITING = 2048  # more requests than a router takes in
_SLOW_NICENESS = 5


class Lanes:
    """Event loop only.

    kind      of the jobs, in metrics and logs
    limit_s   for one job, from when it has a child
    too_slow  the error of one that passes it; given the job's subject
    """

    def __init__(
        self,
        server: ServerProcess,
        kind: str,
        metrics: ChildMetrics,
        clock: Clock,
        *,
        memory_bytes: int,
        limit_s: float,
        too_slow: Callable[[str, float], PdserveError],
    ) -> None:
        quick = PoolLimits(num_children=2, most_waiting=_MOST_WAITING, memory_bytes=memory_bytes)
        slow = PoolLimits(num_children=1, most_waiting=8, memory_bytes=memory_bytes, niceness=_SLOW_NICENESS)
        self.hits = metrics.hits.labels(kind=kind)
        self._quick = Pool(server, kind, quick, metrics, clock)
        self._slow = Pool(server, f"slow_{kind}", slow, metrics, clock)
        self._clock = clock
        self._memory_bytes = memory_bytes
        self._limit_s = limit_s
        self._too_slow = too_slow
        self._hopeless: OrderedDict[Hashable, tuple[float, Failure]] = OrderedDict()

    async def warm_up(self) -> None:
        """Have the children ready. Raises Incompatible if there can be none."""
        await self._quick.warm_up()
        await self._slow.warm_up()

    def close(self) -> None:
        """Let the children go."""
        self._quick.close()
        self._slow.close()

    async def run(self, key: Hashable, subject: str, job: Job, user: str) -> Done:
        """Have a job done.

        key      its content
        subject  what it works on, for errors
        user     whose turn it takes, in either lane
        Raises the job's own error; InvalidRequest for what passes a limit or breaks the child; Overloaded if too many
        wait; Incompatible if there can be no children. Cancelled: the child is killed.
        """
        if self.is_hopeless(key):
            self.hits.inc()
            raise from_failure(self._hopeless[key][1])
        try:
            return await self._run(job, user)
        except JobEnded as ended:
            error = self._error(subject, ended)
            if ended.end is not End.LOST:
                self._hopeless.pop(key, None)
                self._hopeless[key] = self._clock.now_s() + HOPELESS_S, to_failure(error)
                if len(self._hopeless) > _MOST_HOPELESS:
                    self._hopeless.popitem(last=False)
            raise error from None

    def is_hopeless(self, key: Hashable) -> bool:
        """Whether this content passed a limit a short while ago."""
        return key in self._hopeless and self._clock.now_s() < self._hopeless[key][0]

    async def _run(self, job: Job, user: str) -> Done:
        try:
            return await self._quick.run(job, user, self._limit_s, QUICK_CPU_S)
        except JobEnded as ended:
            if ended.end is not End.TIME:
                raise
        return await self._slow.run(job, user, self._limit_s)

    def _error(self, subject: str, ended: JobEnded) -> PdserveError:
        match ended.end:
            case End.TIME:
                return self._too_slow(subject, self._limit_s)
            case End.MEMORY:
                return InvalidRequest(
                    f"{subject} needs more memory than children.memory_bytes", limit_bytes=self._memory_bytes
                )
            case End.CRASH:
                return InvalidRequest(f"{subject} breaks the process that reads it", why=ended.words)
            case End.LOST:
                return Overloaded(f"the process that read {subject} was ended from outside, twice")
