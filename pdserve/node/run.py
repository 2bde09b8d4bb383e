"""One worker in one role: engine, links and sessions wired together, from its first dial to its end.

A role change ends it after a drain; the next one begins with the same loaded model, new links and new sessions.

          loop: this class, sessions, watchdog
           │ FromSession, SessionOpened, …   ▲ ToSession, ToAll, beats, Drained
           ▼                                 │
        engine: a RoleCore ◄──────► transfer: TransferOwner   (kv_transfer/messages.py)
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import structlog

from kv_transfer.messages import LinkState
from kv_transfer.owner import TransferOwner
from pdserve.books import BooksWrong
from pdserve.engine.engine import Engine
from pdserve.errors import Draining, InvariantViolated, StepFailed, to_failure
from pdserve.ids import WorkerRef
from pdserve.messages import (
    Abort,
    Down,
    Drain,
    Hello,
    Load,
    Pair,
    PairState,
    Role,
    SetRole,
    StartDecode,
    StartPrefill,
    Unpair,
    Unsound,
    Up,
    Waiting,
    Welcome,
)
from pdserve.node.gauges import WorkerGauges
from pdserve.node.link_facts import link_facts
from pdserve.node.links import LinkOrders
from pdserve.node.ports import WorkerPorts, WorkerSetup
from pdserve.service.lifecycle import EXIT_OK, EXIT_SUPERSEDED, EXIT_UNSOUND, longest_drain_s
from pdserve.wire_version import announced
from pdserve.worker.bugs import ending_with, until_bug
from pdserve.worker.cache_feed import CacheFeed
from pdserve.worker.first_answers import FirstAnswers
from pdserve.worker.messages import (
    BeginDrain,
    CacheChanged,
    CoreCounts,
    Drained,
    EngineBeat,
    FromSession,
    LinkChanged,
    SessionClosed,
    SessionOpened,
    StepBegun,
    ToAll,
    ToSession,
)
from pdserve.worker.metered_runner import metered
from pdserve.worker.role import CoreParts, RoleCore, limits_of
from pdserve.worker.sessions import RouterSessions
from pdserve.worker.start_gate import StartGate
from pdserve.worker.structures import WorkerStructures
from pdserve.worker.watchdog import Watchdog

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class RunEnd:
    """Why a run is over.

    hangs  the engine's thread can't be stopped: the process must end without waiting for it
    """

    code: int
    next_role: Role | None = None
    hangs: bool = False


@dataclass(frozen=True, slots=True)
class _OwnerDied:
    name: str
    error: BaseException


class RoleRun:
    """Loop only; a SessionListener."""

    def __init__(
        self,
        setup: WorkerSetup,
        ports: WorkerPorts,
        gauges: WorkerGauges,
        *,
        role: Role,
        role_generation: int,
    ) -> None:
        self.role = role
        self._setup = setup
        self._sleep = ports.sleep
        self._count_devices = ports.count_devices
        self._nccl_library = ports.nccl_library
        self._clock = ports.clock
        self._gauges = gauges
        self._role_generation = role_generation
        self._timeouts = setup.config.timeouts
        self._end: asyncio.Future[RunEnd] = asyncio.get_running_loop().create_future()
        self._next_role: Role | None = None
        self.why_unsound = ""  # the process must end, but what is sound may be finished
        self._num_waiting = 0
        self._draining = False
        self._drain_limit: asyncio.TimerHandle | None = None
        self._watchdog = Watchdog(self._timeouts.heartbeat_s)
        self._patience_s = self._timeouts.grant_s / 4  # with the engine, before Waiting is said for it
        self._first_answers = FirstAnswers(self._patience_s, ending_with(self._say_waiting, self._on_bug))
        self._cache_feed = CacheFeed()
        self._assemble(ports)
        self._links = LinkOrders(self._to_transfer)
        self._sessions = RouterSessions(
            routers=setup.config.worker.routers,
            dialer=ports.dialer,
            resolver=ports.resolver,
            hello=self.hello,
            tokenizer_files=setup.model.tokenizer_files,
            cache=self._cache_feed,
            listener=self,
            random=ports.random_for("loop"),
            heartbeat_s=self._timeouts.heartbeat_s,
            silence_s=self._timeouts.link_s,
        )
        self._gate = StartGate(
            setup.model.structures or WorkerStructures(setup.model.tokenizer_files, self._clock),
            ports.prove,
            ports.background,
            self._to_engine,
            self._answer,
            self._on_bug,
        )

    def _assemble(self, ports: WorkerPorts) -> None:
        setup, config, runner = self._setup, self._setup.config, self._setup.model.runner
        from_engine = ports.inbox(ending_with(self._on_engine_message, self._on_bug))
        from_transfer = ports.inbox(ending_with(self._on_transfer_message, self._on_bug))
        end = ports.network(runner.pool, lambda: self._transfer_driver.wake())
        self._engine_driver = ports.drive(
            "engine", None, lambda error: from_engine(_OwnerDied("engine", error))
        )
        self._transfer_driver = ports.drive(
            "transfer", end.waiter, lambda error: from_transfer(_OwnerDied("transfer", error))
        )
        self._to_engine = self._engine_driver.port("loop")
        self._to_transfer = self._transfer_driver.port("loop")
        meter = metered(
            runner, ports.clock, lambda new_shape: from_engine(StepBegun(new_shape)), ports.energy
        )
        self._engine = Engine(
            meter, limits_of(self.role, config.engine, self._timeouts.prefill_progress_s), ports.clock
        )
        parts = CoreParts(
            engine=self._engine,
            meter=meter,
            to_transfer=self._transfer_driver.port("engine"),
            to_loop=from_engine,
            clock=ports.clock,
            random=ports.random_for("engine"),
            config=config,
            tracer=ports.tracer,
        )
        self._core = ports.roles[self.role](parts)
        self._transfer = TransferOwner(
            me=setup.me,
            facts=link_facts(setup, end.memory, self._role_generation),
            pool=end.memory,
            layout=runner.layout,
            network=end.network,
            timeouts=config.timeouts,
            config=config.transport,
            clock=ports.clock,
            random=ports.random_for("transfer"),
            to_engine=self._engine_driver.port("transfer"),
            to_loop=from_transfer,
            secret=setup.secret,
            max_links=config.worker.max_links,
        )

    # --- what others see

    @property
    def engine(self) -> Engine:
        """For tests and simulations that look at its blocks; otherwise the engine owner's."""
        return self._engine

    @property
    def core(self) -> RoleCore:
        """As `engine`: for tests and simulations."""
        return self._core

    @property
    def transfer(self) -> TransferOwner:
        """As `engine`: for tests and simulations."""
        return self._transfer

    @property
    def joined(self) -> bool:
        return self._sessions.joined

    @property
    def draining(self) -> bool:
        return self._draining

    def hello(self) -> Hello:
        """What a router is told first."""
        setup, model = self._setup, self._setup.model
        card, layout = model.runner.card, model.runner.layout
        return Hello(
            worker=setup.me,
            role=self.role,
            role_generation=self._role_generation,
            model=model.name,
            kv_addresses=self._transfer.addresses,
            transports=setup.config.transport.kinds,
            metrics_address=setup.metrics_address,
            kv_layout_json=layout.wire_json(),
            block_size=layout.block_size,
            num_blocks=layout.num_blocks,
            window_tokens=self._engine.window_tokens,
            weights_fingerprint=card.weights_fingerprint,
            tokenizer_fingerprint=model.tokenizer_fingerprint,
            numerics=card.numerics,
            deterministic=card.deterministic,
            cache_seed=card.cache_seed,
            eos_token_ids=model.eos_token_ids,
            vocab_size=card.vocab_size,
            host_id=setup.host_id,
            draining=self._draining,
            wire=announced(setup.config.cluster.wire_minor),
            timeouts=setup.config.timeouts.seconds,
            nccl_library=self._nccl_library(),
        )

    # --- its life

    async def serve(self) -> RunEnd:
        """Serve until drained, superseded, or broken. Cancelled: everything stops at once."""
        self._engine_driver.start(self._core)
        self._transfer_driver.start(self._transfer)
        end = RunEnd(EXIT_UNSOUND)
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(until_bug(self._sessions.run(), self._on_bug)),
                    tasks.create_task(until_bug(self._beat(), self._on_bug)),
                ]
                end = await self._end
                for task in running:
                    task.cancel()
        finally:
            self._first_answers.close()
            self._gate.refuse_all(Draining("the worker ends"))
            if self._drain_limit is not None:
                self._drain_limit.cancel()
            if not end.hangs:
                self._engine_driver.stop()
            self._transfer_driver.stop()
            self._transfer.close()
        return end

    def drain(self) -> None:
        """Take no new work, serve the rest, then end with exit code 0. Idempotent."""
        self._next_role = None  # a process that must go takes no other role
        self._begin_drain()

    def _begin_drain(self) -> None:
        if self._draining:
            return
        self._draining = True
        log.info("worker.draining", role=self.role.value, limit_s=self._timeouts.drain_s)
        self._gate.refuse_all(Draining("the worker accepts no new work"))
        self._to_engine(BeginDrain(self._timeouts.drain_s))
        limit_s = longest_drain_s(self._timeouts)
        self._drain_limit = asyncio.get_running_loop().call_later(limit_s, self._on_drain_limit)

    def set_role(self, role: Role) -> None:
        """Drain, then rejoin in this role, even if it is the present one: routers count on the new session."""
        if self._draining and self._next_role is None:
            log.info("role.unchanged", role=self.role.value, asked=role.value, reason="the worker is leaving")
            return
        self._begin_drain()
        self._next_role = role

    def _on_drained(self) -> None:
        log.info("worker.drained", next_role=self._next_role.value if self._next_role else None)
        self._finish(self._end_of_drain())

    def _end_of_drain(self) -> RunEnd:
        return RunEnd(EXIT_UNSOUND if self.why_unsound else EXIT_OK, self._next_role)

    def _on_drain_limit(self) -> None:
        log.warning("worker.drain_timed_out", limit_s=self._timeouts.drain_s)
        self._finish(self._end_of_drain())

    def _finish(self, end: RunEnd) -> None:
        if not self._end.done():
            self._end.set_result(end)

    async def _beat(self) -> None:
        while True:
            await self._sleep(self._timeouts.heartbeat_s)
            self._sessions.beat(
                self._watchdog.num_steps, self._watchdog.expects_step, self._watchdog.in_step_s
            )
            self._gauges.on_tick(self._transfer.metrics, self._count_devices(), len(self._sessions.routers))
            silent_s = self._watchdog.tick()
            if silent_s is not None:
                log.error("engine.hangs", silent_s=silent_s, num_steps=self._watchdog.num_steps)
                self._end_unsound("the engine hangs", hangs=True)

    # --- SessionListener: what routers say

    def on_session_opened(self, session_id: int, router_id: str) -> None:
        self._links.open(session_id)
        self._to_engine(SessionOpened(session_id, router_id))

    def on_session_closed(self, session_id: int) -> None:
        self._gate.close(session_id)
        self._to_engine(SessionClosed(session_id))
        self._links.close(session_id)

    def on_superseded(self) -> None:
        self._finish(RunEnd(EXIT_SUPERSEDED))

    def on_message(self, session_id: int, message: Down) -> None:
        match message:
            case Pair(decode_worker, addresses):
                self._order(session_id, decode_worker, addresses)
            case Unpair(decode_worker):
                self._links.cancel(session_id, decode_worker)
            case Drain():
                self.drain()
            case SetRole(role):
                self.set_role(role)
            case Welcome():
                pass  # said once, when the session began
            case StartDecode(handle=handle):
                is_busy = self._watchdog.is_busy_for(self._patience_s)
                self._first_answers.asked(session_id, handle, engine_is_busy=is_busy)
                self._gate.take(FromSession(session_id, message, self._clock.now_s()), message)
            case StartPrefill():
                self._gate.take(FromSession(session_id, message, self._clock.now_s()), message)
            case _:
                if isinstance(message, Abort):
                    self._gate.drop(session_id, message.handle)
                self._to_engine(FromSession(session_id, message, self._clock.now_s()))

    def _answer(self, session_id: int, message: Up) -> None:
        self._first_answers.answered(session_id, message)
        self._sessions.send(session_id, message)

    def _say_waiting(self, session_id: int, handle: int) -> None:
        self._sessions.send(session_id, Waiting(handle, self._num_waiting))

    def _order(self, session_id: int, decode_worker: WorkerRef, addresses: tuple[str, ...]) -> None:
        if self.role is not Role.PREFILL:
            reason = f"this worker's role is {self.role.value}"
            self._sessions.send(session_id, PairState(decode_worker, False, reason=reason))
            return
        self._links.order(session_id, decode_worker, addresses)

    # --- what the owners say

    def _on_engine_message(self, message: object) -> None:
        match message:
            case ToSession(session_id, up):
                self._answer(session_id, up)
            case ToAll(up):
                self._sessions.send_all(up)
                if isinstance(up, Load):
                    self._num_waiting = up.num_waiting
                    self._gauges.on_load(up)
            case StepBegun():
                self._watchdog.on_step_begun(message)
            case EngineBeat():
                self._watchdog.on_beat(message)
                self._gauges.on_beat(message)
            case CacheChanged(changes):
                self._cache_feed.change(changes)
            case CoreCounts():
                self._gauges.on_counts(message, self._gate.num_failed)
            case Drained():
                self._on_drained()
            case BooksWrong():
                self._on_wrong_books(message)
            case _OwnerDied(name, error):
                self._on_death(name, error)
            case _:
                raise InvariantViolated("not a message of the engine owner", kind=type(message).__name__)

    def _on_transfer_message(self, message: object) -> None:
        match message:
            case LinkState(decode_worker=decode_worker):
                # The engine first: a router that knows of the link may use it at once.
                self._to_engine(LinkChanged(decode_worker, message.up, message.reason))
                state = PairState(
                    decode_worker, message.up, message.transport, message.reason, message.generation
                )
                for session_id in self._links.concerned(message):
                    self._sessions.send(session_id, state)
            case BooksWrong():
                self._on_wrong_books(message)
            case _OwnerDied(name, error):
                self._on_death(name, error)
            case _:
                raise InvariantViolated("not a message of the transfer owner", kind=type(message).__name__)

    def break_off(self, reason: str) -> None:
        """See `Worker.break_off`. The engine's thread isn't waited for: it may wait for what is gone."""
        log.error("worker.unsound", reason=reason)
        self._end_unsound(reason, hangs=True)

    def _on_wrong_books(self, found: BooksWrong) -> None:
        """Finish what is sound, then leave for the supervisor to start another process."""
        log.error("worker.books_wrong", book=found.book, **found.facts)
        self._gauges.on_wrong_books(found.book)
        self.why_unsound = self.why_unsound or f"its books of {found.book} don't add up"
        self.drain()

    def _on_bug(self, bug: Exception) -> None:
        """In the loop's own part: what it has taken in only half can't be trusted."""
        self._on_death("loop", bug)

    def _on_death(self, name: str, error: BaseException) -> None:
        log.error("worker.unsound", owner=name, error=str(error))
        self._end_unsound(f"the {name} owner failed")

    def _end_unsound(self, why: str, *, hangs: bool = False) -> None:
        """Leave, after a last word to the routers: what ran here may be what broke it."""
        if not self._end.done():
            error = StepFailed("the worker ends: its state isn't sound", worker=self._setup.me, reason=why)
            self._sessions.send_all(Unsound(to_failure(error)))
        self._finish(RunEnd(EXIT_UNSOUND, hangs=hangs))
