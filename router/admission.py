"""Who may wait, who goes next: the router's one queue, bounded, in front of the pairs."""

from __future__ import annotations

from collections.abc import Callable

from pdserve.clock import Clock
from pdserve.errors import Draining, NoWorker, Overloaded, PdserveError, UnknownModel
from pdserve.service.router_config import RouterConfig
from router.fleet import Fleet
from router.metrics import RouterMetrics
from router.no_worker_timeout import NoWorkerTimeout
from router.placement import NotNow, Placement, Placer
from router.queue import FairQueue
from router.queue_speed import QueueSpeed
from router.ticket import Ticket

RETRY_AFTER_S = (0.1, 30.0)


class Place:
    """One of the bounded places in front of the workers. Event-loop thread only.

    received_s  when it was taken: a request's waiting is counted from there
    """

    def __init__(self, received_s: float, on_free: Callable[[], None]) -> None:
        self.received_s = received_s
        self._on_free: Callable[[], None] | None = on_free

    def give_back(self) -> None:
        """Somebody else may have it. Idempotent."""
        if self._on_free is not None:
            on_free, self._on_free = self._on_free, None
            on_free()


class Admission:
    """Event-loop thread only.

    New requests take one of `max_queued_requests` places when they arrive, before they are read, until a pair is
    found, or are refused at once; so is one whose deadline would have passed, by the estimate, before its first token.
    Replays of accepted requests always find a place, but only so many run at a time.
    """

    def __init__(
        self,
        config: RouterConfig,
        worker_wait_s: float,
        fleet: Fleet,
        placer: Placer,
        clock: Clock,
        metrics: RouterMetrics,
    ) -> None:
        self._config = config
        self._worker_wait_s = worker_wait_s
        self._fleet = fleet
        self._placer = placer
        self._clock = clock
        self._metrics = metrics
        self._queue: FairQueue[Ticket] = FairQueue()
        self.num_places = 0  # that are taken
        self.num_waiting_tokens = 0  # prompt tokens of the attempts that wait for a pair
        self._replaying: dict[Ticket, None] = {}
        self._no_worker = NoWorkerTimeout(
            self._queue, fleet.topology, worker_wait_s, clock, self._end_waiting
        )
        self._pumping = False
        self._pump_again = False
        self._speed = QueueSpeed()
        self.draining = False

    # --- places

    def arrive(self) -> Place:
        """Take one of the bounded places; whoever takes it gives it back.

        Raises Overloaded when all are taken, Draining when the router takes no new requests.
        """
        if self.draining:
            raise Draining("this router is draining")
        if self.num_places >= self._config.max_queued_requests:
            self._metrics.refused.labels(reason="full").inc()
            raise Overloaded(
                "the queue is full",
                retry_after_s=self._retry_after_s(),
                limit=self._config.max_queued_requests,
            )
        self.num_places += 1
        self._metrics.queue_places.set(self.num_places)
        return Place(self._clock.now_s(), self._left)

    def _left(self) -> None:
        self.num_places -= 1
        self._metrics.queue_places.set(self.num_places)

    def _retry_after_s(self) -> float:
        """The time in which a tenth of the queue has gone, at the queue's recent speed."""
        return _within(RETRY_AFTER_S, 0.1 * self._speed.wait_s(len(self._queue), self._clock.now_s()) or 1.0)

    @property
    def num_replaying(self) -> int:
        """Replays that count against `max_replays`."""
        return len(self._replaying)

    @property
    def num_waiting(self) -> int:
        """Attempts that wait for a pair."""
        return len(self._queue)

    @property
    def waiting(self) -> tuple[Ticket, ...]:
        """What waits, in the order in which it came."""
        return tuple(self._queue)

    # --- waiting

    def submit(self, ticket: Ticket) -> None:
        """Let an attempt wait; it may be started within this call, or refused."""
        self._queue.push(ticket, self._clock.now_s())
        self.num_waiting_tokens += ticket.need.num_tokens
        self.pump()
        if ticket not in self._queue or self._refuse_if_late(ticket, self._estimate_s(ticket)):
            return
        if ticket.need.num_tokens == self.num_waiting_tokens:
            # The first one that waits: don't leave it to the heartbeat.
            self._fleet.tell_demand(self.num_waiting_tokens)

    def withdraw(self, ticket: Ticket) -> None:
        """It no longer waits, for whatever reason; idempotent."""
        if ticket in self._queue:
            self._queue.remove(ticket)
            self.num_waiting_tokens -= ticket.need.num_tokens
            if not len(self._queue):
                self._speed.emptied()
            self._gauges()

    def settled(self, ticket: Ticket) -> None:
        """A replay runs, or has ended: another one may be started. Idempotent; no error for other attempts."""
        if ticket in self._replaying:
            del self._replaying[ticket]
            self._gauges()
            self.pump()

    def _end_waiting(self, ticket: Ticket, error: PdserveError) -> None:
        self.withdraw(ticket)
        if not ticket.outcome.done():  # else it was cancelled, and its task hasn't had its turn
            ticket.outcome.set_exception(error)

    # --- starting

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
                self._no_worker.look()
                self._start_possible()
        finally:
            self._pumping = False
        self._gauges()

    def _start_possible(self) -> None:
        replays_wait = False
        passed_replays: dict[Ticket, None] = {}
        passed_over: dict[str, None] = {}
        while True:
            ticket = None if replays_wait else self._queue.first_replay(passed_replays)
            if ticket is not None and len(self._replaying) >= self.max_replays:
                replays_wait, ticket = True, None
            if ticket is None:
                ticket = self._queue.first_new(self._clock.now_s(), passed_over)
            if ticket is None:
                return
            if ticket.outcome.done():
                self.withdraw(ticket)  # cancelled, and its task hasn't had its turn to say so
                continue
            if ticket.need.identity != self._fleet.identity:
                self._end_waiting(ticket, UnknownModel("the cluster serves another model by now"))
                continue
            placement = self._placer.place(ticket.need)
            if isinstance(placement, Placement):
                first_token_s = placement.cost.ttft_s if placement.cost.known else None
                if not self._refuse_if_late(ticket, first_token_s):
                    self._start(ticket, placement)
                continue
            ticket.why_waiting = placement.explain
            if self._end_if_unfit(ticket, placement):
                continue
            if placement.for_all:
                return
            if ticket.replay:
                passed_replays[ticket] = None
            else:
                passed_over[ticket.user] = None

    def _end_if_unfit(self, ticket: Ticket, placement: NotNow) -> bool:
        """End one that fits none of the remaining workers, if no larger one comes back in time."""
        if not placement.fits_nobody:
            ticket.unfit_since_s = None
            return False
        now_s = self._clock.now_s()
        if ticket.unfit_since_s is None:
            ticket.unfit_since_s = now_s
        if now_s - ticket.unfit_since_s < self._worker_wait_s:
            return False
        error = NoWorker(
            "no worker with so large a window has joined",
            value=ticket.need.max_total_tokens,
            limit=self._fleet.window_tokens,
            waited_s=self._worker_wait_s,
        )
        self._end_waiting(ticket, error)
        return True

    @property
    def max_replays(self) -> int:
        """Replays that may prefill at once."""
        return self._config.replays_per_prefill * max(1, self._fleet.topology.num_prefills)

    def _start(self, ticket: Ticket, placement: Placement) -> None:
        now_s = self._clock.now_s()
        self._queue.served(ticket, now_s)
        self.num_waiting_tokens -= ticket.need.num_tokens
        self._speed.started(now_s, others_wait=len(self._queue) > 0)
        if ticket.replay:
            self._replaying[ticket] = None
        ticket.start(placement)

    def _gauges(self) -> None:
        self._metrics.queue_length.set(len(self._queue))
        self._metrics.queue_tokens.set(self.num_waiting_tokens)
        self._metrics.replays_running.set(len(self._replaying))

    # --- deadlines

    def _estimate_s(self, ticket: Ticket) -> float | None:
        """Until the first token of one that must wait: those ahead of it, then its own. None if nobody can say."""
        if not _may_be_refused(ticket):
            return None  # nobody asks
        first_token_s = self._placer.first_token_s(ticket.need)
        if first_token_s is None:
            return None
        now_s = self._clock.now_s()
        at_most_s = self._speed.wait_s(len(self._queue), now_s) + first_token_s
        if at_most_s <= ticket.left_s():
            return at_most_s  # who is ahead of it need not be counted
        return self._speed.wait_s(self._queue.num_ahead(ticket), now_s) + first_token_s

    def _refuse_if_late(self, ticket: Ticket, estimate_s: float | None) -> bool:
        """End one whose deadline would pass before its first token."""
        left_s = ticket.left_s()
        if not _may_be_refused(ticket) or estimate_s is None or estimate_s <= left_s:
            return False
        self._metrics.refused.labels(reason="deadline").inc()
        error = Overloaded(
            "the first token would come after the deadline",
            retry_after_s=_within(RETRY_AFTER_S, estimate_s - left_s),
            estimate_s=round(estimate_s, 3),
            deadline_left_s=round(left_s, 3),
        )
        self._end_waiting(ticket, error)
        return True


def _may_be_refused(ticket: Ticket) -> bool:
    """What the client has begun to read goes on."""
    return not ticket.replay and ticket.name.choice == 0


def _within(bounds: tuple[float, float], value: float) -> float:
    return min(bounds[1], max(bounds[0], value))
