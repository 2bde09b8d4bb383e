"""The whole router without sockets: workers' sessions come in at one side, requests at the other."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import structlog
from prometheus_client import CollectorRegistry

from pdserve.chat import check_chat
from pdserve.children.prover import InlineProver, Prover
from pdserve.children.renderer import ChatRenderer, InlineRenderer
from pdserve.clock import Clock
from pdserve.errors import (
    Incompatible,
    InvalidRequest,
    InvariantViolated,
    PdserveError,
    RequestCancelled,
    Stale,
    UnknownRequest,
    WorkerLost,
    too_large,
)
from pdserve.ids import Random, draw_text_id
from pdserve.messages import Down, Hello, TokenizerFile, Up, Welcome
from pdserve.request import Chat, GenerateRequest, Limits
from pdserve.service.api_keys import ApiKey
from pdserve.service.config import Config
from pdserve.service.rpc_requests import READ_AT_ONCE_BYTES
from pdserve.session import Session
from pdserve.status import ClusterStatus, ModelInfo, PlacementStatus
from pdserve.tokenizer import Tokenizer
from pdserve.tracing import Tracer
from pdserve.wire_version import announced, spoken
from router.admission import Admission, Place
from router.asked import Asked
from router.callers import Caller, Callers
from router.choice_run import Parts
from router.conductor import Conductor, phases_of
from router.explain import NUM_KEPT, Explained
from router.fleet import Fleet
from router.learning import Learner
from router.member import Member
from router.metrics import RouterMetrics
from router.model_text import ModelText
from router.operators import Operators
from router.placement import Placer
from router.scaling_notes import ScalingNotes
from router.status import for_tenant, read_placements, read_status
from router.structures import Structures
from router.summary import refusals_told, tell_unread
from router.turns import Turns
from router.work import Work

log = structlog.get_logger()

HELLO_S = 5.0  # a session that has opened must say who it is within so long


class RouterApp:
    """Use as `async with RouterApp(...) as app`; everything runs inside, and ends with it.

    router_id   "" = router.id, or drawn
    tokenizer   of router.model, for good; None = the first worker sends it
    work        where tokenizing runs: ThreadWork, or InlineWork under virtual time
    structure_work  where structures are compiled: as `work` if there is none of its own
    prover, renderer  try structures and write chats within limits; None: nobody is hostile
    keys        who may ask, by id; None = everybody
    on_serving  called when requests become, or cease to be, servable: a pair, or a worker alone, is usable, and the
                tokenizer is there
    """

    def __init__(
        self,
        config: Config,
        clock: Clock,
        random: Random,
        *,
        work: Work,
        structure_work: Work | None = None,
        prover: Prover | None = None,
        renderer: ChatRenderer | None = None,
        router_id: str = "",
        tokenizer: Tokenizer | None = None,
        registry: CollectorRegistry | None = None,
        on_serving: Callable[[bool], None] | None = None,
        keys: Mapping[str, ApiKey] | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.id = router_id or config.router.id or draw_text_id(random, "router")
        self.metrics = RouterMetrics(registry if registry is not None else CollectorRegistry())
        shares_cache = config.router.tenants_share_cache
        self.callers = Callers(keys, clock, self.metrics.tenants.limited, shares_cache=shares_cache)
        self.fleet = Fleet(config.router, config.timeouts, clock, self.metrics)
        self.turns = Turns(work, clock, self.metrics, config.router.max_reading_bytes)
        self.text = ModelText(work, self.turns, renderer or InlineRenderer(), tokenizer)
        self._config = config
        self._wire = announced(config.cluster.wire_minor)
        self._clock = clock
        self._random = random
        self.operators = Operators(self.fleet, ScalingNotes(self.metrics.registry, clock))
        placer = Placer(
            self.fleet.topology,
            clock,
            random,
            remote_prefill_tokens=config.router.remote_prefill_tokens,
        )
        self.admission = Admission(
            config.router, config.timeouts.worker_wait_s, self.fleet, placer, clock, self.metrics
        )
        self.explanations: deque[Explained] = deque(maxlen=NUM_KEPT)
        self._tasks = asyncio.TaskGroup()
        compiling = Turns(structure_work or work, clock, self.metrics, config.router.max_reading_bytes)
        self._structures = Structures(
            prover or InlineProver(), compiling, self._tasks.create_task, clock, self.metrics
        )
        self._parts = Parts(
            config=config,
            clock=clock,
            random=random,
            fleet=self.fleet,
            admission=self.admission,
            turns=self.turns,
            text=self.text,
            structures=self._structures,
            metrics=self.metrics,
            learner=Learner(placer.priors, clock, self.metrics),
            tracer=tracer or Tracer.off(),
            explanations=self.explanations,
        )
        self._conductors: dict[tuple[str, str], Conductor] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._ticker: asyncio.TimerHandle | None = None
        self._serving = self._has_parted = False
        self._on_serving = on_serving
        self.text.prepare = self._structures.prepare
        self.text.on_loaded = self._serving_changed
        self.fleet.on_change = self.admission.pump
        self.fleet.on_topology = self._serving_changed
        self.fleet.on_tokenizer_file = self._on_tokenizer_file

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        if self.text.tokenizer is not None:
            await self._structures.prepare(self.text.tokenizer)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_ticking()
        for conductor in tuple(self._conductors.values()):
            conductor.cancel(RequestCancelled("the router stops"))
        self.close_sessions()
        await self._tasks.__aexit__(kind, error, trace)

    # --- workers

    def close_sessions(self) -> None:
        """Part with all workers, also with who comes just now: the router stops."""
        self._has_parted = True
        for member in self.fleet.members:
            member.session.close("the router stops")

    async def attach_session(self, session: Session[Down, Up]) -> None:
        """Run one worker's session until it has ended. What it raises, but for CancelledError, is a bug."""
        member: Member | None = None
        error: PdserveError = WorkerLost("the router ends the session", peer=session.peer)
        try:
            member = await self._welcome(session)
            while member.live:
                self.fleet.on_message(member, await session.receive())
        except TimeoutError:
            log.warning("session.silent", peer=session.peer, after_s=HELLO_S)
        except (Incompatible, Stale, InvalidRequest) as refusal:
            kind = type(refusal).__name__
            log.error("worker.refused", peer=session.peer, error=kind, reason=str(refusal))
            self.metrics.workers_refused.labels(reason=kind).inc()
            session.refuse(refusal)
            error = refusal
        except PdserveError as lost:
            error = lost
            if isinstance(lost, InvariantViolated):  # a bug of this router
                raise
        finally:
            if member is not None:
                self.text.forget(member.id)
                self.fleet.leave(member, error)
                if not self.fleet.members:
                    self._stop_ticking()
            session.close(str(error))

    async def _welcome(self, session: Session[Down, Up]) -> Member:
        async with asyncio.timeout(HELLO_S):
            hello = await session.receive()
        if self._has_parted:
            raise WorkerLost("the router stops")
        if not isinstance(hello, Hello):
            raise InvalidRequest("the first message of a session must be Hello", got=type(hello).__name__)
        spoken(self._wire, hello.wire)
        wants = self.text.wants(hello)
        member = self.fleet.join(session, hello, lambda: self._welcomed(session, hello, wants))
        self._start_ticking()
        return member

    def _welcomed(self, session: Session[Down, Up], hello: Hello, wants_tokenizer: bool) -> None:
        self.text.expect(hello.tokenizer_fingerprint)
        session.send(Welcome(self.id, wants_tokenizer, self._wire))

    def _on_tokenizer_file(self, member: Member, file: TokenizerFile) -> None:
        files = self.text.add_file(member.id, file)
        if files is not None:
            self._tasks.create_task(self._load_tokenizer(member, files))

    async def _load_tokenizer(self, member: Member, files: dict[str, bytes]) -> None:
        try:
            await self.text.load(files, member.hello.tokenizer_fingerprint)
        except PdserveError as error:
            log.error("tokenizer.refused", worker=member.id, reason=str(error))
            member.session.refuse(error)

    def _serving_changed(self) -> None:
        """Workers, pairs or the tokenizer have changed."""
        missing = self.fleet.topology.missing or ("" if self.text.tokenizer is not None else "tokenizer")
        if (serving := not missing) != self._serving:
            self._serving = serving
            self.metrics.serving.set(serving)
            log.info("router.serving" if serving else "router.not_serving", missing=missing)
            if self._on_serving is not None:
                self._on_serving(serving)

    # --- once a heartbeat

    def _start_ticking(self) -> None:
        if self._ticker is None:
            beat_s = self._config.timeouts.heartbeat_s
            self._ticker = asyncio.get_running_loop().call_later(beat_s, self._tick)

    def _stop_ticking(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
            self._ticker = None

    def _tick(self) -> None:
        self._ticker = None
        now_s = self._clock.now_s()
        self.fleet.tick(self.admission.num_waiting_tokens)
        for conductor in self._conductors.values():
            conductor.log_if_stuck(now_s)
        self.metrics.show_phases(phases_of(self._conductors.values()))
        if self.fleet.members:
            self._start_ticking()

    # --- requests

    def on_unread(self, error: PdserveError) -> None:
        """A message was refused before anything was made of it."""
        tell_unread(error, self.metrics)

    async def read(
        self, make: Callable[[Limits], GenerateRequest], asker: str, num_bytes: int
    ) -> GenerateRequest:
        """The request of a message of so many bytes, checked; beside the loop if it is a large one.

        make   raises InvalidRequest
        asker  whose turn that takes
        Raises Overloaded, too, and NoWorker for a large one while nobody knows the window.
        """
        if num_bytes > READ_AT_ONCE_BYTES:
            await self.fleet.get_identity(self._config.timeouts.worker_wait_s)
        limits = self.fleet.limits
        return await self.turns.call(lambda: make(limits), user=asker, num_bytes=num_bytes)

    def generate(self, request: GenerateRequest, **how: Any) -> Conductor:
        """Check one request and begin it. Raises as `begin`, and InvalidRequest at once for one that breaks a rule."""
        with refusals_told(request.request_id, self.metrics):
            request.check(self.fleet.limits)
        return self.begin(request, **how)

    def begin(
        self,
        request: GenerateRequest,
        *,
        caller: Caller | None = None,
        place: Place | None = None,
        asker: str = "",
        deadline_left_s: float | None = None,
        traceparent: str = "",
        only: tuple[str, str] | None = None,
    ) -> Conductor:
        """Accept a request that was checked; what only the model can tell of it is raised by the first event.

        caller           who asks; None = where nobody is asked who it is
        place            taken when the request arrived; None = it arrives now
        asker            whose turn it takes while it is tokenized; "" = its user's
        deadline_left_s  seconds that the client gives; None = timeouts.request_s
        traceparent      of the client's call: which trace it belongs to
        only             (prefill id, decode id) that alone may serve it; None = any
        Raises InvalidRequest if its id runs already; PermissionDenied for what its caller may not ask; Overloaded or
        Draining if the router takes no new requests.
        """
        caller = caller or self.callers.everybody
        request_id = request.request_id or draw_text_id(self._random, "req")
        with refusals_told(request_id, self.metrics):
            caller.check_priority(request.priority)
            if (name := (caller.tenant, request_id)) in self._conductors:
                raise InvalidRequest("a request of this id is running", request_id=request_id)
            place = place or self.admission.arrive()
        if deadline_left_s is None or not math.isfinite(deadline_left_s):
            deadline_left_s = self._config.timeouts.request_s
        above = self._parts.tracer.begin(traceparent)
        asked = Asked(
            caller=caller,
            request=request,
            request_id=request_id,
            asker=asker or request.user,
            traceparent=traceparent,
            received_s=place.received_s,
            deadline_s=self._clock.now_s() + deadline_left_s,
            clock=self._clock,
            only=only,
            above=above,
            place=None if above is None else above.below(),
        )
        conductor = self._conductors[name] = Conductor(self._parts, asked, place.give_back)
        self._idle.clear()
        task = self._tasks.create_task(conductor.run())
        conductor.bind(task)
        task.add_done_callback(lambda _: self._forget(name, place))
        return conductor

    def _forget(self, name: tuple[str, str], place: Place) -> None:
        place.give_back()
        self._conductors.pop(name).finish_unrun()
        if not self._conductors:
            self._idle.set()

    def abort(self, request_id: str, caller: Caller | None = None) -> None:
        """End a request of the caller's tenant, or of any for an admin's key.

        Raises UnknownRequest if it doesn't run here, or is another's.
        """
        caller = caller or self.callers.everybody
        found = self._conductors.get((caller.tenant, request_id))
        if found is None and caller.sees_all:
            found = next((each for (_, name), each in self._conductors.items() if name == request_id), None)
        if found is None:
            raise UnknownRequest("no such request runs at this router", request_id=request_id)
        found.cancel(RequestCancelled("aborted", request_id=request_id))

    async def tokenize(self, source: str | Chat, asker: str = "") -> tuple[int, ...]:
        """Ids of a text, or of a chat by the model's template. Raises InvalidRequest, Overloaded."""
        if isinstance(source, Chat):
            await self.turns.call(lambda: check_chat(source), user=asker, num_bytes=source.num_characters)
        return await self.text.encode(await self._tokenizer(), source, self.fleet.limits, user=asker)

    async def detokenize(self, token_ids: Sequence[int], asker: str = "") -> str:
        """Text of ids. Raises InvalidRequest, for more than the window holds unread; Overloaded, NoWorker."""
        await self._check_ids(token_ids)
        return await self.text.decode(await self._tokenizer(), tuple(token_ids), user=asker)

    async def token_bytes(self, token_ids: Sequence[int], asker: str = "") -> list[bytes]:
        """How each of these is written by itself, nothing for what is no token. Raises as `detokenize`."""
        await self._check_ids(token_ids)
        return await self.text.token_bytes(await self._tokenizer(), token_ids, user=asker)

    async def _check_ids(self, token_ids: Sequence[int]) -> None:
        await self.fleet.get_identity(self._config.timeouts.worker_wait_s)
        if (value := len(token_ids)) > (limit := self.fleet.window_tokens):
            raise too_large("token_ids", "more token ids than the window holds", limit=limit, value=value)

    async def _tokenizer(self) -> Tokenizer:
        return await self.text.get(self._config.timeouts.worker_wait_s)

    async def model(self) -> ModelInfo:
        """The model that is served. Raises NoWorker if none has been told of."""
        tokenizer = await self._tokenizer()
        identity = await self.fleet.get_identity(self._config.timeouts.worker_wait_s)
        return identity.told(tokenizer, self.fleet.window_tokens)

    @property
    def conductors(self) -> tuple[Conductor, ...]:
        """All requests in hand; for tests and simulations."""
        return tuple(self._conductors.values())

    def status(self, *, explain: bool = False, caller: Caller | None = None) -> ClusterStatus:
        """Workers, pairs and the queue as they are now; of a tenant's caller its own requests only.

        explain  also why requests went where they went, or wait
        """
        caller, now_s = caller or self.callers.everybody, self._clock.now_s()
        user = None if caller.sees_all else caller.tenant
        placements: tuple[PlacementStatus, ...] = ()
        if explain:
            placements = read_placements(self.explanations, self.admission, now_s, user)
        status = read_status(
            self.id,
            self.fleet,
            self.admission,
            self._config.router.max_queued_requests,
            len(self._conductors),
            placements,
            self.metrics.figures(now_s),
            self._config.timeouts.seconds,
            self.operators.scaling.status(),
        )
        if user is None:
            return status
        return for_tenant(status, self.admission, user, sum(user == tenant for tenant, _ in self._conductors))

    # --- readiness and drain

    @property
    def ready(self) -> bool:
        """Tokenizer loaded, not draining."""
        return self.text.tokenizer is not None and not self.admission.draining

    @property
    def serving(self) -> bool:
        """Whether a request would be served now: by a pair, or a worker alone, and there is a tokenizer."""
        return self._serving

    async def drain(self) -> None:
        """Take no new requests, end those that only wait, serve the others for at most drain_s.

        What is left then ends UNAVAILABLE with what its client needs to go on at another router.
        """
        if not self.admission.draining:
            self.admission.draining = True
            log.info(
                "router.draining", num_running=len(self._conductors), num_waiting=self.admission.num_waiting
            )
        for conductor in tuple(self._conductors.values()):
            if conductor.waits:
                conductor.cancel(conductor.draining())
        try:
            async with asyncio.timeout(self._config.timeouts.drain_s):
                await self._idle.wait()
        except TimeoutError:
            for conductor in tuple(self._conductors.values()):
                conductor.cancel(conductor.draining())
            await self._idle.wait()
        log.info("router.drained")
