"""Nobody to wait for: how long requests wait for a worker of a missing role to join."""

from __future__ import annotations

from collections.abc import Callable

from pdserve.clock import Clock
from pdserve.errors import NoWorker
from router.progress_timer import ProgressTimer
from router.queue import FairQueue
from router.ticket import Ticket
from router.topology import PAIR, Topology


class NoWorkerTimeout:
    """Ends what has waited for `wait_s` while a role was missing. Event-loop thread only.

    give_up  takes a ticket out of the queue and ends it with this error
    """

    def __init__(
        self,
        queue: FairQueue[Ticket],
        topology: Topology,
        wait_s: float,
        clock: Clock,
        give_up: Callable[[Ticket, NoWorker], None],
    ) -> None:
        self._queue = queue
        self._topology = topology
        self._wait_s = wait_s
        self._clock = clock
        self._give_up = give_up
        self._since_s: float | None = None
        self._timer = ProgressTimer(clock, self._expired)

    def look(self) -> None:
        """Workers, or the queue, may have changed."""
        if not self._topology.missing:
            self._since_s = None
            self._timer.stop()
        elif len(self._queue):
            if self._since_s is None:
                self._since_s = self._clock.now_s()
            if not self._timer.active:
                self._timer.restart(self._wait_s)

    def _expired(self) -> None:
        assert self._since_s is not None
        now_s = self._clock.now_s()
        next_s: float | None = None
        for ticket in self._queue:
            left_s = max(self._since_s, ticket.submitted_s) + self._wait_s - now_s
            if left_s <= 1e-6:
                self._give_up(ticket, self._error())
            elif next_s is None or left_s < next_s:
                next_s = left_s
        if next_s is not None:
            self._timer.restart(next_s)

    def _error(self) -> NoWorker:
        missing = self._topology.missing
        if missing == PAIR:
            return NoWorker(
                "no pair of a prefill and a decode worker came up",
                waited_s=self._wait_s,
                pairs=self._topology.pair_reasons(),
            )
        return NoWorker(f"no {missing} worker has joined", missing=missing, waited_s=self._wait_s)
