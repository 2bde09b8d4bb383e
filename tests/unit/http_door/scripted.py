"""A door on a real socket, and behind it a backend that does what a test says."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TypeVar

from prometheus_client import CollectorRegistry, generate_latest
from starlette.types import ASGIApp

from http_door.app import Door, make_app
from http_door.metrics import HttpMetrics
from http_door.port import Call, Visit
from http_door.server import DoorServer
from http_door.styles import KnownStyles
from pdserve.clock import SystemClock
from pdserve.errors import PdserveError
from pdserve.request import Chat, Event, Finished, GenerateRequest, Limits, Started, Timings, Tokens, Usage
from pdserve.sampling import FinishReason, TokenLogprobs
from pdserve.service.config import Config, load
from pdserve.service.receiving import Receiving
from pdserve.status import ClusterStatus, ModelInfo
from tests.support.waiting import until

T = TypeVar("T")
Answering = Callable[[GenerateRequest], AsyncGenerator[Event, None]]

STARTED = Started(
    request_id="r", seed=1, num_prompt_tokens=4, num_cached_tokens=2, prompt_token_ids=(1, 2, 3, 4), model="m"
)


def tokens(text: str, *, choice: int = 0, first_index: int = 0, logprobs: bool = False) -> Tokens:
    """One token a byte; logprobs: each with itself and the byte after it as the most likely ones."""
    ids = tuple(text.encode())
    rows = tuple(TokenLogprobs(-0.5, ((each, -0.5), (each + 1, -1.5))) for each in ids) if logprobs else ()
    return Tokens(choice=choice, first_index=first_index, token_ids=ids, text=text, logprobs=rows)


def finished(choice: int = 0, reason: FinishReason = FinishReason.EOS, num_tokens: int = 1) -> Finished:
    usage = Usage(num_prompt_tokens=4, num_cached_tokens=2, num_completion_tokens=num_tokens)
    return Finished(choice=choice, reason=reason, usage=usage, timings=Timings(), num_attempts=1)


async def says_ab(request: GenerateRequest) -> AsyncGenerator[Event, None]:
    """Two tokens for each choice."""
    yield STARTED
    wants = request.sampling.logprobs is not None
    for choice in range(request.n):
        yield tokens("a", choice=choice, logprobs=wants)
        yield tokens("b", choice=choice, first_index=1, logprobs=wants)
        yield finished(choice, num_tokens=2)


def raising(error: Exception, after_s: float = 0.0) -> Answering:
    """Fails before the first event."""

    async def answer(request: GenerateRequest) -> AsyncGenerator[Event, None]:
        await asyncio.sleep(after_s)
        if error:
            raise error
        yield STARTED

    return answer


@dataclass(slots=True)
class ScriptedBackend:
    """refuses: raised by `visit`. closed: set when a generation has been closed before its end."""

    answer: Answering = says_ab
    refuses: PdserveError | None = None
    reasons: tuple[str, ...] = ()
    calls: list[Call] = field(default_factory=list)
    requests: list[GenerateRequest] = field(default_factory=list)
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    num_visits: int = 0
    look: Callable[[], ClusterStatus] | None = None

    @contextlib.contextmanager
    def visit(self, call: Call) -> Iterator[Visit]:
        self.calls.append(call)
        if self.refuses is not None:
            raise self.refuses
        self.num_visits += 1
        try:
            yield ScriptedVisit(self)
        finally:
            self.num_visits -= 1

    async def model(self) -> ModelInfo:
        return ModelInfo(
            model="m", window_tokens=128, vocab_size=256, eos_token_ids=(0,), has_chat_template=True,
            weights_fingerprint="", tokenizer_fingerprint="",
        )  # fmt: skip

    def not_ready(self) -> Sequence[str]:
        return self.reasons

    def metrics(self, call: Call) -> bytes:
        return generate_latest(self.registry)


@dataclass(slots=True)
class ScriptedVisit:
    backend: ScriptedBackend
    asker: str = "somebody"

    async def read(self, work: Callable[[], T], num_bytes: int) -> T:
        return work()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        request.check(Limits())
        self.backend.requests.append(request)
        try:
            async with contextlib.aclosing(self.backend.answer(request)) as events:
                async for event in events:
                    yield event
        except (asyncio.CancelledError, GeneratorExit):
            self.backend.closed.set()
            raise

    async def tokenize(self, source: str | Chat) -> tuple[int, ...]:
        text = source if isinstance(source, str) else source.messages[-1].content
        return tuple(text.encode())

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(each % 128) for each in token_ids)

    async def token_bytes(self, token_ids: Sequence[int]) -> Sequence[bytes]:
        return [bytes((each % 256,)) for each in token_ids]

    async def model(self) -> ModelInfo:
        return await self.backend.model()

    async def status(self, *, explain: bool = False) -> ClusterStatus:
        assert self.backend.look is not None
        return self.backend.look()


@dataclass(frozen=True, slots=True)
class OpenedDoor:
    address: str
    metrics: HttpMetrics

    def count(self, name: str, **labels: str) -> float:
        """Of a metric's sample; 0 if there is none."""
        return self.metrics.registry.get_sample_value(name, labels) or 0.0

    async def counts(self, name: str, wanted: float, **labels: str) -> None:
        """Return when it has so many."""

        async def has() -> bool:
            return self.count(name, **labels) == wanted

        await until(f"{wanted} of {name}", has)


def made_door(
    backend: ScriptedBackend,
    *,
    comment_s: float = 10.0,
    stall_s: float = 30.0,
    shows_page: bool = True,
    **settings: object,
) -> Door:
    """settings: of the table `http`."""
    flags = {f"http.{name}": value for name, value in settings.items()}
    config: Config = load(flags={**flags, "timeouts.client_stall_s": stall_s})
    clock = SystemClock()
    return Door(
        backend=backend,
        config=config,
        clock=clock,
        random=Random(1),
        metrics=HttpMetrics(backend.registry),
        receiving=Receiving(64, clock, lambda: None),
        begun_s=0,
        styles=KnownStyles(config.http, clock, config.router.max_reading_bytes),
        comment_s=comment_s,
        shows_page=shows_page,
    )


def made_app(backend: ScriptedBackend) -> ASGIApp:
    """Without a socket."""
    return make_app(made_door(backend))


@contextlib.asynccontextmanager
async def opened(
    backend: ScriptedBackend,
    *,
    comment_s: float = 10.0,
    stall_s: float = 30.0,
    shows_page: bool = True,
    **settings: object,
) -> AsyncIterator[OpenedDoor]:
    """A door at a free port of this machine. settings: of the table `http`."""
    door = made_door(backend, comment_s=comment_s, stall_s=stall_s, shows_page=shows_page, **settings)
    server = DoorServer(make_app(door), stall_s=stall_s, tls=None, stop_grace_s=2.0)
    try:
        yield OpenedDoor(server.start("127.0.0.1:0", "http.listen"), door.metrics)
    finally:
        await server.stop()
