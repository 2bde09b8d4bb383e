"""Who may wait, who goes next: the router's one queue, bounded, in front of the pairs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pdserve.clock import Clock
from pdserve.errors import Draining, NoWorker, Overloaded, UnknownModel
from pdserve.service.config import RouterConfig
from router.attempt import Attempt
from router.fleet import PAIR, Fleet
from router.metrics import RouterMetrics
from router.placement import Need, Placement, Placer
from router.progress_timer import CallLater, ProgressTimer
from router.queue import FairQueue

RETRY_AFTER_S = (0.1, 30.0)


@dataclass(slots=True, eq=False, kw_only=True)
class Ticket:
    """One attempt that waits for a pair.

    queued_s     when its request was received; submitted_s: when this attempt began to wait
    start        makes and starts the attempt, in the very call in which the pair is chosen
    attempt      resolved with it, or with NoWorker
    """

    need: Need
    queued_s: float
    submitted_s: float
    priority: int
    user: str
    replay: bool
    start: Callable[[Placement], Attempt]
    attempt: asyncio.Future[Attempt]


class Admission:
    """Event-loop thread only.

    New requests take one of `max_queued_requests` places from their first moment until a pair is found, or are
    refused at once. Replays of accepted requests always find a place, but only so many run at a time.
    """

    def __init__(
        self,
        config: RouterConfig,
        worker_wait_s: float,
        fleet: Fleet,
        placer: Placer,
        clock: Clock,
        call_later: CallLater,
        metrics: RouterMetrics,
    ) -> None:
        self._config = config
        self._worker_wait_s = worker_wait_s
        self._fleet = fleet
        self._placer = placer
        self._clock = clock
        self._metrics = metrics
        self._queue: FairQueue[Ticket] = FairQueue()
        self._num_places = 0
        self._num_tokens = 0
        self._replaying: dict[Ticket, None] = {}
        self._missing_since_s: float | None = None
        self._missing_timer = ProgressTimer(call_later, clock, self._give_up_waiting)
        self._pumping = False
        self._pump_again = False
        self._served_s: float | None = None
        self._interval_s: float | None = None  # between two that got their pair, smoothed
        self.draining = False

    # --- places

    @contextmanager
    def place(self) -> Iterator[Callable[[], None]]:
        """Hold one of the bounded places; yields the function that gives it back early.

        Raises Overloaded when all are taken, Draining when the router takes no new requests.
        """
        if self.draining:
            raise Draining("this router is draining")
        if self._num_places >= self._config.max_queued_requests:
            self._metrics.refused_full.inc()
            raise Overloaded(
                "the queue is full",
                retry_after_s=self._retry_after_s(),
                limit=self._config.max_queued_requests,
            )
        self._num_places += 1
        held = True

        def give_back() -> None:
            nonlocal held
            if held:
                held = False
                self._num_places -= 1

        try:
            yield give_back
        finally:
            give_back()

    def _retry_after_s(self) -> float:
        """The time in which a tenth of the queue has gone, at the pace of late."""
        least_s, most_s = RETRY_AFTER_S
        if self._interval_s is None:
            return 1.0
        return min(most_s, max(least_s, 0.1 * len(self._queue) * self._interval_s))

    @property
    def num_waiting(self) -> int:
        """Attempts that wait for a pair."""
        return len(self._queue)

    @property
    def num_waiting_tokens(self) -> int:
        """Their prompt tokens."""
        return self._num_tokens

    @property
    def waiting(self) -> tuple[Ticket, ...]:
        """What waits, in the order in which it came."""
        return tuple(self._queue)

    # --- waiting

    def submit(self, ticket: Ticket) -> None:
        """Let an attempt wait; it may be started within this call."""
        self._queue.push(ticket, self._clock.now_s())
        self._num_tokens += ticket.need.num_tokens
        self.pump()
        if not ticket.attempt.done() and ticket.need.num_tokens == self._num_tokens:
            self._fleet.tell_demand(
                self._num_tokens
            )  # the first one that waits: don't leave it to the heartbeat

    def withdraw(self, ticket: Ticket) -> None:
        """It waits no more, for whatever reason; idempotent."""
        before = len(self._queue)
        self._queue.remove(ticket)
        if len(self._queue) < before:
            self._num_tokens -= ticket.need.num_tokens
            self._gauges()

    def settled(self, ticket: Ticket) -> None:
        """A replay runs, or has ended: another one may be started. Idempotent; no error for other attempts."""
        if ticket in self._replaying:
            del self._replaying[ticket]
            self._gauges()
            self.pump()

    def pump(self) -> None:
        """Start what can be started, in order."""
        if self._pumping:
            self._pump_again = True
            return
        if not len(self._queue):
            return  # every report of every worker comes here
        self._pumping = True
        try:
            self._pump_again = True
            while self._pump_again:
                self._pump_again = False
                self._watch_missing()
                self._start_possible()
        finally:
            self._pumping = False
        self._gauges()

    def _start_possible(self) -> None:
        replays_wait = False
        passed_over: dict[str, None] = {}
        while True:
            ticket = None if replays_wait else self._queue.first_replay()
            if ticket is not None and len(self._replaying) >= self.max_replays:
                replays_wait, ticket = True, None
            if ticket is None:
                ticket = self._queue.first_new(self._clock.now_s(), passed_over)
            if ticket is None:
                return
            if ticket.need.identity != self._fleet.identity:
                self.withdraw(ticket)
                ticket.attempt.set_exception(UnknownModel("the cluster serves another model by now"))
                continue
            placement = self._placer.place(ticket.need)
            if isinstance(placement, Placement):
                self._start(ticket, placement)
            elif placement.for_all:
                return
            elif ticket.replay:
                replays_wait = True
            else:
                passed_over[ticket.user] = None

    @property
    def max_replays(self) -> int:
        """Replays that may prefill at once."""
        return self._config.replays_per_prefill * max(1, self._fleet.num_prefills)

    def _start(self, ticket: Ticket, placement: Placement) -> None:
        now_s = self._clock.now_s()
        self._queue.served(ticket, now_s)
        self._num_tokens -= ticket.need.num_tokens
        if self._served_s is not None:
            interval_s = now_s - self._served_s
            known_s = interval_s if self._interval_s is None else self._interval_s
            self._interval_s = 0.9 * known_s + 0.1 * interval_s
        self._served_s = now_s
        if ticket.replay:
            self._replaying[ticket] = None
        ticket.attempt.set_result(ticket.start(placement))

    def _gauges(self) -> None:
        self._metrics.queue_length.set(len(self._queue))
        self._metrics.queue_tokens.set(self._num_tokens)
        self._metrics.replays_running.set(len(self._replaying))

    # --- nobody to wait for

    def _watch_missing(self) -> None:
        """Start, or stop, the time in which a worker of a missing role must join."""
        if not self._fleet.missing:
            self._missing_since_s = None
            self._missing_timer.stop()
        elif len(self._queue):
            if self._missing_since_s is None:
                self._missing_since_s = self._clock.now_s()
            if not self._missing_timer.active:
                self._missing_timer.restart(self._worker_wait_s)

    def _give_up_waiting(self) -> None:
        assert self._missing_since_s is not None
        now_s = self._clock.now_s()
        next_s: float | None = None
        for ticket in self._queue:
            left_s = max(self._missing_since_s, ticket.submitted_s) + self._worker_wait_s - now_s
            if left_s <= 1e-6:
                self.withdraw(ticket)
                ticket.attempt.set_exception(self._no_worker())
            elif next_s is None or left_s < next_s:
                next_s = left_s
        if next_s is not None:
            self._missing_timer.restart(next_s)

    def _no_worker(self) -> NoWorker:
        missing = self._fleet.missing
        if missing == PAIR:
            return NoWorker(
                "no pair of a prefill and a decode worker came up",
                waited_s=self._worker_wait_s,
                pairs=self._fleet.pair_reasons(),
            )
        return NoWorker(f"no {missing} worker has joined", missing=missing, waited_s=self._worker_wait_s)
