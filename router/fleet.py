"""The workers that are here: sessions, epochs, signs of life, pairs, and what the router may do with them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence

import structlog

from pdserve.block_messages import BlockEvents
from pdserve.clock import Clock
from pdserve.errors import Draining, NoWorker, PdserveError, Stale, StepFailed, WorkerLost
from pdserve.ids import WorkerRef
from pdserve.messages import (
    AttemptMessage,
    Credits,
    Demand,
    Down,
    DownHeartbeat,
    Granted,
    Heartbeat,
    Hello,
    Load,
    PairState,
    Role,
    Step,
    StepTokens,
    Superseded,
    TokenizerFile,
    Unsound,
    Up,
)
from pdserve.request import Limits
from pdserve.service.config import TimeoutsConfig
from pdserve.service.router_config import RouterConfig
from pdserve.session import Session
from pdserve.wire_version import FIRST, text
from router.identity import ModelIdentity, check_hello
from router.liveness import Liveness
from router.member import Member
from router.metrics import RouterMetrics
from router.pairs import PairOrders
from router.topology import Topology

log = structlog.get_logger()

LATE_BEATS = 1.5  # a worker so late with its heartbeat is silent for now
EVENTS_S = 5.0  # a worker tells its block events within so long, or never
STOOD_BEATS = 3.0  # this router's own beat so late tells that the router stood still


class Fleet:
    """Everything the router knows of its workers. Event-loop thread only.

    on_change          called after anything that may let a waiting request go on
    on_topology        called when workers or pairs have changed
    on_tokenizer_file  called with each file of a tokenizer that a worker was asked for
    """

    def __init__(
        self,
        config: RouterConfig,
        timeouts: TimeoutsConfig,
        clock: Clock,
        metrics: RouterMetrics,
    ) -> None:
        self._timeouts = timeouts
        self._clock = clock
        self._metrics = metrics
        self._members: dict[str, Member] = {}
        self.topology = Topology(self._members, allow_local_prefill=config.allow_local_prefill)
        self._orders = PairOrders(config.pairs_per_prefill)
        self._ticked_s = clock.now_s()
        self._stuck: dict[WorkerRef, int] = {}  # processes whose engine hung, and the step count they hung at
        self._known = asyncio.Event()
        self.identity: ModelIdentity | None = None
        self.window_tokens = 0  # the smallest of those that are here; stays when all have left
        self.on_change: Callable[[], None] = lambda: None
        self.on_topology: Callable[[], None] = lambda: None
        self.on_tokenizer_file: Callable[[Member, TokenizerFile], None] = lambda member, file: None

    # --- membership

    @property
    def members(self) -> Sequence[Member]:
        """Those that are here, by time of joining."""
        return self.topology.members

    @property
    def limits(self) -> Limits:
        """What is known of the model and the workers' window."""
        vocab_size = None if self.identity is None else self.identity.vocab_size
        return Limits(vocab_size=vocab_size, window_tokens=self.window_tokens or None)

    def get(self, worker_id: str) -> Member | None:
        """The live session of a worker."""
        return self._members.get(worker_id)

    def join(self, session: Session[Down, Up], hello: Hello, welcome: Callable[[], None]) -> Member:
        """Take a worker in. welcome: called once it is accepted, before anything else is sent to it.

        Raises Incompatible, and Stale if a later epoch of this worker id is here (it then has been told Superseded).
        """
        check_hello(hello)
        if self.identity is not None and self._members:
            self.identity.check(hello)
        self._settle_epochs(session, hello)
        if self.identity is None or not self._members:
            self.identity = ModelIdentity.of(hello)
            self._known.set()
        welcome()
        stuck_at = self._stuck.pop(hello.worker, None)
        late_s = LATE_BEATS * self._timeouts.heartbeat_s
        now_s = self._clock.now_s()
        liveness = Liveness(now_s, self._timeouts.link_s, late_s, stuck_at)
        member = Member(session, hello, liveness, now_s, draining=hello.draining)
        # It takes its turn with the others from now on, and isn't given all that they had in the last seconds.
        alike = [each for each in self._members.values() if each.hello.role is hello.role]
        if alike:
            now_s = self._clock.now_s()
            member.accounting.begin(min(each.accounting.recent(now_s) for each in alike), now_s)
        self._members[member.id] = member
        self._renew_window()
        log.info(
            "worker.joined",
            worker=member.id,
            epoch=str(member.ref.epoch),
            role=hello.role.value,
            role_generation=hello.role_generation,
            peer=session.peer,
            wire=text(hello.wire or FIRST),
            window_tokens=hello.window_tokens,
            num_blocks=hello.num_blocks,
        )
        self._membership_changed()
        return member

    def _settle_epochs(self, session: Session[Down, Up], hello: Hello) -> None:
        """Only one process of a worker id stays: the later one; of one process, the later session."""
        earlier = self._members.get(hello.worker.id)
        if earlier is None:
            return
        if hello.worker.epoch < earlier.ref.epoch:
            session.send(Superseded())
            raise Stale("a later epoch of this worker is here", worker=hello.worker, here=earlier.ref)
        if hello.worker.epoch > earlier.ref.epoch:
            self._supersede(earlier)
        else:
            self.leave(earlier, WorkerLost("the worker has opened a new session", worker=earlier.ref))
            earlier.session.close("a new session of this worker has begun")

    def _supersede(self, earlier: Member) -> None:
        """Nothing of it is used from here on."""
        earlier.session.send(Superseded())
        self.leave(earlier, WorkerLost("superseded by a later epoch", worker=earlier.ref))
        earlier.session.close("superseded by a later epoch")  # what was sent before still goes

    def leave(self, member: Member, error: PdserveError) -> None:
        """A session has ended: all that ran on it learns of it. Idempotent."""
        if not member.live:
            return
        member.live = False
        del self._members[member.id]
        log.info("worker.left", worker=member.id, epoch=str(member.ref.epoch), reason=str(error))
        self._metrics.workers_left.inc()
        legs = list(member.legs.values())
        member.legs.clear()
        for leg in legs:
            leg.on_session_lost(member, error)
        self._renew_window()
        self._membership_changed()

    def _membership_changed(self) -> None:
        self._orders.refresh(self.members, self._clock.now_s())
        for role in Role:
            count = sum(1 for member in self._members.values() if member.hello.role is role)
            self._metrics.workers.labels(role=role.value).set(count)
        self._topology_changed()

    def _renew_window(self) -> None:
        windows = [member.hello.window_tokens for member in self._members.values()]
        self.window_tokens = min(windows, default=self.window_tokens)

    def _topology_changed(self) -> None:
        self._metrics.pairs_up.set(len(self.topology.usable_pairs()))
        self.on_topology()
        self.on_change()

    async def get_identity(self, wait_s: float) -> ModelIdentity:
        """The model that is served; waits for the first worker. Raises NoWorker after wait_s."""
        try:
            async with asyncio.timeout(wait_s):
                await self._known.wait()
        except TimeoutError:
            raise NoWorker("no worker has joined that knows the model", waited_s=wait_s) from None
        assert self.identity is not None
        return self.identity

    # --- what a worker says

    def on_message(self, member: Member, message: Up) -> None:
        """Take in one message; never waits."""
        if not member.live:
            return
        member.liveness.heard(self._clock.now_s())
        match message:
            case Step():
                for tokens in message.sequences:
                    leg = member.legs.get(tokens.handle)
                    if leg is None:
                        self._drop(tokens)
                    else:
                        leg.on_message(member, tokens)
            case Heartbeat():
                self._on_heartbeat(member, message)
            case Load():
                self._on_load(member, message)
            case PairState():
                self._on_pair_state(member, message)
            case Credits():
                member.credit.balance = message.balance
                self.on_change()
            case BlockEvents(whole=whole):
                if whole and member.cache.is_told:
                    self._metrics.cache_event_gaps.inc()
                member.cache.told(message)
            case TokenizerFile():
                self.on_tokenizer_file(member, message)
            case Unsound(failure):
                log.error(
                    "worker.unsound", worker=member.id, reason=failure.message, fields=dict(failure.fields)
                )
                self.leave(
                    member, StepFailed("the worker ended itself", worker=member.ref, reason=failure.message)
                )
                member.session.close("the worker ends itself")
            case Hello():
                raise WorkerLost("a second Hello on one session", worker=member.ref)
            case _:
                self._to_leg(member, message)
        if member.live and not member.books_add_up:
            self._on_wrong_books(member)

    def _to_leg(self, member: Member, message: AttemptMessage) -> None:
        leg = member.legs.get(message.handle)
        if leg is None:
            self._drop(message)
            return
        held = member.credit.available
        member.answered(message.handle)
        if isinstance(message, Granted):
            member.asking.pop(message.handle, None)
        leg.on_message(member, message)
        if member.credit.available > held or isinstance(message, Granted):
            self.on_change()

    def _on_wrong_books(self, member: Member) -> None:
        """A new session begins with new ones."""
        log.error(
            "worker.books_wrong",
            worker=member.id,
            num_attempts=len(member.legs),
            num_assigned=member.accounting.num_assigned,
            num_holding_credit=member.credit.num_held,
        )
        self._metrics.books_wrong.labels(book="bookings").inc()
        reason = "the router's books of this worker don't add up"
        self.leave(member, WorkerLost(reason, worker=member.ref))
        member.session.close(reason)

    def _drop(self, message: AttemptMessage | StepTokens) -> None:
        """It came under a handle that is closed."""
        self._metrics.dropped_messages.labels(message=type(message).__name__).inc()

    def _on_heartbeat(self, member: Member, beat: Heartbeat) -> None:
        was_suspect = member.liveness.suspect
        member.liveness.heartbeat(beat.num_steps, beat.has_work, self._clock.now_s(), beat.in_step_s)
        if was_suspect and not member.liveness.suspect:
            self._topology_changed()

    def _on_load(self, member: Member, load: Load) -> None:
        member.accounting.report(load, self._clock.now_s())
        member.liveness.reported_step_time(load.slowest_step_s)
        member.refusing = member.doubted = False
        if load.draining and not member.draining:
            self.mark_draining(member)
        self.on_change()

    def _on_pair_state(self, member: Member, state: PairState) -> None:
        if not self._orders.on_state(member, state):
            return
        log.info(
            "pair.up" if state.up else "pair.down",
            prefill=member.id,
            decode=state.decode_worker.id,
            transport=state.transport,
            reason=state.reason,
            generation=state.generation,
        )
        self._topology_changed()

    # --- what the router has learnt

    def mark_refusing(self, member: Member, error: PdserveError) -> None:
        """It refused something: it isn't asked again before its next load report."""
        member.refusing = True
        if isinstance(error, Draining):
            self.mark_draining(member)
        self._orders.widen(self.members, self._clock.now_s())

    def mark_link_lost(self, prefill: Member, decode: Member, generation: int) -> None:
        """A decode worker says that its link to a prefill worker is gone.

        It often knows first that the other is dead: no other pair of it is tried either before it reports again, or
        one dead worker would cost a request all its attempts.
        """
        prefill.doubted = True
        if self._orders.on_lost(prefill, decode.ref, generation):
            log.info("pair.lost", prefill=prefill.id, decode=decode.id, generation=generation)
            self._topology_changed()

    def mark_draining(self, member: Member) -> None:
        """It takes no new work from here on."""
        if not member.draining:
            member.draining = True
            log.info("worker.draining", worker=member.id)
            self._topology_changed()

    def attempt_ended(self) -> None:
        """Credit and load that an attempt held are free."""
        self.on_change()

    def tick(self, num_waiting_tokens: int) -> None:
        """Once a heartbeat: say that the router lives, tell demand, look for those that no longer live."""
        now_s = self._clock.now_s()
        stood_still = now_s - self._ticked_s > STOOD_BEATS * self._timeouts.heartbeat_s
        self._ticked_s = now_s
        self._orders.ask_again(self.members, now_s)
        self._orders.narrow(self.members, now_s)
        self._note_without_events(now_s)
        for member in self.members:
            # After this process itself was stopped or had no CPU, the workers' signs of life lie unread.
            reason = "" if stood_still else member.liveness.why_dead(now_s)
            if reason:
                if member.liveness.hangs:
                    self._stuck[member.ref] = member.liveness.num_steps
                self.leave(member, WorkerLost(reason, worker=member.ref))
                member.session.close(reason)
            else:
                member.send(DownHeartbeat())
        self.tell_demand(num_waiting_tokens)

    def _note_without_events(self, now_s: float) -> None:
        """Count, and name once, the workers whose prefix hits are only predicted."""
        missing = [
            member
            for member in self.members
            if not member.cache.is_told and now_s - member.joined_s >= EVENTS_S
        ]
        for member in missing:
            if not member.silence_told:
                member.silence_told = True
                log.warning(
                    "cache_events.missing",
                    worker=member.id,
                    wire=text(member.hello.wire or FIRST),
                    effect="its prefix hits are predicted",
                )
        self._metrics.without_cache_events.set(len(missing))

    def tell_demand(self, num_waiting_tokens: int) -> None:
        """Ask the prefill workers for credit: what waits here, in equal parts."""
        prefills = [member for member in self.members if member.prefills and member.usable]
        for member in prefills:
            demand = math.ceil(num_waiting_tokens / len(prefills))
            if demand != member.demand:
                member.demand = demand
                member.send(Demand(demand))
