"""A router under virtual time with workers that a test speaks for, message by message, over in-memory sessions."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self, TypeVar

from prometheus_client import CollectorRegistry

from pdserve.block_messages import BlockCounts
from pdserve.errors import Failure, Incompatible, PdserveError, WorkerLost, to_failure
from pdserve.ids import Epoch, WorkerRef
from pdserve.messages import (
    Credits,
    DecodeStarted,
    Down,
    DownHeartbeat,
    Failed,
    FirstToken,
    Granted,
    Heartbeat,
    Hello,
    Load,
    Pair,
    PairState,
    Phase,
    Progress,
    Refused,
    Role,
    SequenceFinished,
    StartDecode,
    StartPrefill,
    Step,
    StepTokens,
    Up,
    Welcome,
)
from pdserve.request import Event, Finished, GenerateRequest, Started, Tokens
from pdserve.sampling import FinishReason, SamplingParams
from pdserve.service.config import Config, TimeoutsConfig
from pdserve.service.router_config import RouterConfig
from pdserve.tokenizer import Tokenizer
from pdserve.tracing import Tracer
from router.admission import Place
from router.app import RouterApp
from router.callers import Caller
from router.conductor import Conductor
from router.work import InlineWork, Work
from tests.support.memory_session import MemoryWire
from tests.support.virtual_loop import VirtualLoop, run_virtual

M = TypeVar("M")
DELAY_S = 0.001
PATIENCE_S = 30.0
EOS = 256


def virtual(scenario: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    """Run an async test under virtual time; it fails if it hangs or leaves a task behind."""

    @functools.wraps(scenario)
    def run() -> None:
        run_virtual(_awaited(scenario), limit_s=20_000)

    del run.__wrapped__  # pytest would take the scenario for a coroutine test of its own
    return run


async def _awaited(scenario: Callable[[], Awaitable[None]]) -> None:
    await scenario()


def config(router: dict[str, Any] | None = None, **timeouts: float) -> Config:
    """A configuration with a few values other than the defaults."""
    return Config(router=RouterConfig(**({"id": "r0"} | (router or {}))), timeouts=TimeoutsConfig(**timeouts))


class Cluster:
    """One router; workers are added by the test. `async with`."""

    def __init__(
        self,
        conf: Config | None = None,
        *,
        tokenizer: bool = True,
        seed: int = 1,
        work: Work | None = None,
        registry: CollectorRegistry | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.clock = loop.clock
        self.serving: list[bool] = []
        self.app = RouterApp(
            conf if conf is not None else config(),
            self.clock,
            random.Random(seed),
            work=work or InlineWork(),
            registry=registry,
            tokenizer=Tokenizer.fake() if tokenizer else None,
            on_serving=self.serving.append,
            tracer=tracer,
        )
        self._tasks = asyncio.TaskGroup()
        self._workers: list[ScriptedWorker] = []

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        await self.app.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            worker.stop()
        await self.app.__aexit__(kind, error, trace)
        await self._tasks.__aexit__(kind, error, trace)

    @property
    def workers(self) -> tuple[ScriptedWorker, ...]:
        """All that ever dialled."""
        return tuple(self._workers)

    def dial(self, hello: Hello) -> ScriptedWorker:
        """A new session; the Hello is on its way."""
        wire = MemoryWire(asyncio.get_running_loop().call_later, lambda: DELAY_S, worker=hello.worker.id)
        self._tasks.create_task(self.app.attach_session(wire.router_end))
        worker = ScriptedWorker(wire, hello, self._tasks)
        self._workers.append(worker)
        worker.say(hello)
        return worker

    async def join(self, hello: Hello) -> ScriptedWorker:
        """A worker that the router has taken in, with a load report."""
        worker = self.dial(hello)
        await worker.expect(Welcome)
        worker.say(load(num_blocks=hello.num_blocks))
        if hello.role is Role.PREFILL:
            worker.say(Credits(100_000))
        await self.settle()
        return worker

    async def prefill(self, name: str = "p0", **fields: Any) -> ScriptedWorker:
        return await self.join(hello(name, Role.PREFILL, **fields))

    async def decode(self, name: str = "d0", **fields: Any) -> ScriptedWorker:
        return await self.join(hello(name, Role.DECODE, **fields))

    async def pair(self, p: str = "p0", d: str = "d0") -> tuple[ScriptedWorker, ScriptedWorker]:
        """A prefill and a decode worker whose link is up."""
        prefill, decode = await self.prefill(p), await self.decode(d)
        await self.link(prefill, decode)
        return prefill, decode

    async def link(self, prefill: ScriptedWorker, *decodes: ScriptedWorker) -> None:
        """The prefill worker says that its links to these are up; the router must have asked for them."""
        for decode in decodes:
            assert any(
                isinstance(message, Pair) and message.decode_worker == decode.ref
                for message in prefill.received
            )
            prefill.say(PairState(decode.ref, True, "stream", generation=1))
        await self.settle()

    async def settle(self, for_s: float = 5 * DELAY_S) -> None:
        """Let messages arrive."""
        await asyncio.sleep(for_s)

    async def advance(self, by_s: float) -> None:
        """Let time pass, with every worker's heartbeat."""
        end_s = self.clock.now_s() + by_s
        while self.clock.now_s() < end_s:
            for worker in self._workers:
                worker.beat()
            await asyncio.sleep(min(0.5, max(0.0, end_s - self.clock.now_s())))

    def generate(
        self,
        ids: str | tuple[int, ...] = "hello",
        *,
        caller: Caller | None = None,
        place: Place | None = None,
        deadline_left_s: float | None = None,
        traceparent: str = "",
        **fields: Any,
    ) -> Client:
        """A client of one request; sampling fields and request fields by name."""
        names = SamplingParams.__dataclass_fields__
        sampling = SamplingParams(**{"max_tokens": 4} | {k: v for k, v in fields.items() if k in names})
        others = {k: v for k, v in fields.items() if k not in names}
        request = GenerateRequest(input=ids, sampling=sampling, **others)
        generation = self.app.generate(
            request,
            caller=caller,
            place=place,
            deadline_left_s=deadline_left_s,
            traceparent=traceparent,
        )
        return Client(generation, self._tasks)


class ScriptedWorker:
    """The worker's end of one session."""

    def __init__(self, wire: MemoryWire, said: Hello, tasks: asyncio.TaskGroup) -> None:
        self.wire = wire
        self.hello = said
        self.received: list[Down] = []
        self.lost: WorkerLost | Incompatible | None = None
        self.silent = False
        self.in_step_s = 0.0
        self._num_expected = 0
        self._num_steps = 0
        self._changed = asyncio.Event()
        self._task = tasks.create_task(self._read())

    @property
    def ref(self) -> WorkerRef:
        return self.hello.worker

    def say(self, *messages: Up) -> None:
        for message in messages:
            self.wire.worker_end.send(message)

    def beat(self) -> None:
        if self.silent:
            return
        if self.in_step_s:  # of a new shape, as its own watchdog calls it: no hang
            self.in_step_s += 0.5
            self.say(Heartbeat(self._num_steps, False, self.in_step_s))
            return
        self._num_steps += 1
        self.say(Heartbeat(self._num_steps, True))

    async def expect(self, kind: type[M], within_s: float = PATIENCE_S) -> M:
        """The next message of this kind; those of other kinds before it are passed over."""
        async with asyncio.timeout(within_s):
            while True:
                while self._num_expected < len(self.received):
                    message = self.received[self._num_expected]
                    self._num_expected += 1
                    if isinstance(message, kind):
                        return message
                if self.lost is not None:
                    raise self.lost
                self._changed.clear()
                await self._changed.wait()

    def skip(self) -> None:
        """Expect nothing of what has come so far."""
        self._num_expected = len(self.received)

    async def expect_end(self, within_s: float = PATIENCE_S) -> WorkerLost | Incompatible:
        """The session's end as the worker learns it."""
        async with asyncio.timeout(within_s):
            while self.lost is None:
                self._changed.clear()
                await self._changed.wait()
        return self.lost

    def got(self, kind: type[M]) -> list[M]:
        """All messages of this kind so far."""
        return [message for message in self.received if isinstance(message, kind)]

    def die(self) -> None:
        """The process is killed."""
        self.wire.reset("killed")

    def stop(self) -> None:
        self.wire.worker_end.close("test over")
        self._task.cancel()

    async def _read(self) -> None:
        try:
            while True:
                message = await self.wire.worker_end.receive()
                if not isinstance(message, DownHeartbeat):
                    self.received.append(message)
                    self._changed.set()
        except (WorkerLost, Incompatible) as lost:
            self.lost = lost
            self._changed.set()

    # --- what workers say about an attempt

    def grant(self, start: StartDecode, lease_id: int = 7, cached: int = 0) -> None:
        """No lease for a worker that prefills for itself."""
        self.say(Granted(start.handle, 0 if start.source is None else lease_id, cached))

    def first(
        self,
        start: StartPrefill,
        token_id: int,
        reason: FinishReason | None = None,
        cached: int = 0,
        *,
        queue_s: float = 0.002,
        prefill_s: float = 0.003,
    ) -> None:
        self.say(
            FirstToken(
                handle=start.handle,
                token_id=token_id,
                logprobs=None,
                reason=reason,
                num_cached_tokens=cached,
                queue_s=queue_s,
                prefill_s=prefill_s,
            )
        )

    def started(self, start: StartDecode, token_id: int, **fields: Any) -> None:
        self.say(
            DecodeStarted(
                handle=start.handle, first_token=token_id, logprobs=None, num_cached_tokens=0, **fields
            )
        )

    def tokens(self, start: StartDecode, first_position: int, *ids: int) -> None:
        self.say(Step((StepTokens(start.handle, first_position, ids),)))

    def finished(
        self, start: StartDecode, num_tokens: int, reason: FinishReason = FinishReason.LENGTH
    ) -> None:
        self.say(SequenceFinished(handle=start.handle, reason=reason, num_tokens=num_tokens))

    def progress(self, start: StartDecode | StartPrefill, phase: Phase, amount: int = 0) -> None:
        self.say(Progress(start.handle, phase, amount))

    def fail(self, start: StartDecode | StartPrefill, error: PdserveError) -> None:
        self.say(Failed(start.handle, failure(error)))

    def refuse(self, start: StartDecode | StartPrefill, error: PdserveError) -> None:
        self.say(Refused(start.handle, failure(error)))


class Client:
    """Reads a request's stream to its end."""

    def __init__(self, generation: Conductor, tasks: asyncio.TaskGroup) -> None:
        self.generation = generation
        self.events: list[Event] = []
        self.error: PdserveError | None = None
        self._task = tasks.create_task(self._read())
        self._gate = asyncio.Event()
        self._gate.set()

    async def _read(self) -> None:
        try:
            async for event in self.generation:
                self.events.append(event)
                await self._gate.wait()
        except PdserveError as error:
            self.error = error

    def pause(self) -> None:
        self._gate.clear()

    def resume(self) -> None:
        self._gate.set()

    async def end(self, within_s: float = 3600.0) -> Client:
        """Wait until the stream has ended."""
        async with asyncio.timeout(within_s):
            await asyncio.shield(self._task)
        return self

    @property
    def done(self) -> bool:
        return self._task.done()

    @property
    def started(self) -> Started:
        found = [event for event in self.events if isinstance(event, Started)]
        assert len(found) == 1 and self.events[0] is found[0]
        return found[0]

    def tokens(self, choice: int = 0) -> list[Tokens]:
        return [event for event in self.events if isinstance(event, Tokens) and event.choice == choice]

    def ids(self, choice: int = 0) -> list[int]:
        """Token ids shown; checks that the indices leave no gap."""
        ids: list[int] = []
        for event in self.tokens(choice):
            assert event.first_index - self.tokens(choice)[0].first_index == len(ids)
            ids.extend(event.token_ids)
        return ids

    def text(self, choice: int = 0) -> str:
        return "".join(event.text for event in self.tokens(choice))

    def finished(self, choice: int = 0) -> Finished:
        (found,) = [e for e in self.events if isinstance(e, Finished) and e.choice == choice]
        return found


def hello(name: str, role: Role, *, start_ns: int = 1, role_generation: int = 0, **fields: Any) -> Hello:
    values: dict[str, Any] = {
        "worker": WorkerRef(name, Epoch(start_ns, 1)),
        "role": role,
        "role_generation": role_generation,
        "model": "m",
        "kv_addresses": (f"tcp://{name}:1",),
        "transports": ("stream",),
        "metrics_address": "",
        "kv_layout_json": "{}",
        "block_size": 16,
        "num_blocks": 1000,
        "window_tokens": 4096,
        "weights_fingerprint": "w",
        "tokenizer_fingerprint": Tokenizer.fake().fingerprint,
        "numerics": "n",
        "deterministic": False,
        "cache_seed": b"seed",
        "eos_token_ids": (EOS,),
        "vocab_size": 260,
        "host_id": "h",
    }
    return Hello(**values | fields)


def load(num_blocks: int = 1000, **fields: Any) -> Load:
    values: dict[str, Any] = {
        "blocks": BlockCounts(num_blocks, 0, 0, 0, 0),
        "num_running": 0,
        "num_waiting": 0,
        "num_queued_tokens": 0,
        "num_queued_short_tokens": 0,
        "chunk_tokens": 512,
        "num_cache_hit_tokens": 0,
        "num_cache_query_tokens": 0,
        "prefill_tokens_per_s": 1000.0,
        "step_s": 0.02,
        "slowest_step_s": 0.02,
        "draining": False,
    }
    return Load(**values | fields)


def failure(error: PdserveError) -> Failure:
    return to_failure(error)
