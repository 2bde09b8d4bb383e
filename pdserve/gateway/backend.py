"""Any number of routers behind an HTTP door: requests go on at another one when theirs is lost."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import TypeVar

import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from http_door.port import Call, Visit
from pdserve.client import AsyncClient
from pdserve.clock import Clock
from pdserve.errors import Draining, NoWorker, PdserveError, Unauthenticated
from pdserve.request import Chat, Event, GenerateRequest
from pdserve.service.rpc_requests import READ_AT_ONCE_BYTES
from pdserve.status import ClusterStatus, ModelInfo

T = TypeVar("T")

LOOK_EVERY_S = 1.0
SPELLED_FOR_S = 60.0  # after so long, tokens are asked for again: another model may be served
NUM_THREADS = 2
_DRAINING = "draining"

log = structlog.get_logger()


class SpelledTokens:
    """How tokens are written, as routers have told. Event-loop thread only."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._known: dict[int, bytes] = {}
        self._begun_s = clock.now_s()

    async def get(self, token_ids: Sequence[int], client: AsyncClient) -> list[bytes]:
        """Of these ids; those that aren't known yet are asked for."""
        now_s = self._clock.now_s()
        if now_s - self._begun_s > SPELLED_FOR_S:
            self._known, self._begun_s = {}, now_s
        known = self._known
        if missing := [token_id for token_id in dict.fromkeys(token_ids) if token_id not in known]:
            known.update(zip(missing, await client.token_bytes(missing)))
        return [known[token_id] for token_id in token_ids]


class Gateway:
    """See Backend. Event-loop thread only.

    must_ask_for_keys  serve only while the routers ask for API keys, since strangers can reach this door
    """

    def __init__(
        self, client: AsyncClient, clock: Clock, registry: CollectorRegistry, *, must_ask_for_keys: bool
    ) -> None:
        self.client = client
        self.spelled = SpelledTokens(clock)
        self.threads = asyncio.Semaphore(NUM_THREADS)
        self._registry = registry
        self._must_ask_for_keys = must_ask_for_keys
        self._reason = "no router has answered yet"
        self._is_open = must_ask_for_keys  # to everybody, until routers have shown that they ask
        self._ends = ""  # why nobody should be led here any more

    @contextlib.contextmanager
    def visit(self, call: Call) -> Iterator[Visit]:
        if self._ends == _DRAINING:
            raise Draining("this gateway is draining")
        if self._is_open:
            raise NoWorker(self._reason)
        yield _GatewayVisit(self, call)

    def not_ready(self) -> Sequence[str]:
        reason = self._ends or self._reason
        return (reason,) if reason else ()

    def metrics(self, call: Call) -> bytes:
        return generate_latest(self._registry)

    def announce_end(self) -> None:
        """Not to be ready any more; calls are still served, since whoever leads them here learns of it late."""
        self._ends = "asked to stop"

    def drain(self) -> None:
        """Refuse calls from now on."""
        self._ends = _DRAINING

    async def watch(self) -> None:
        """Keep knowing whether a router serves; until cancelled."""
        while True:
            before = self._reason
            await self.look()
            if self._reason != before:
                log.info("gateway.not_serving" if self._reason else "gateway.serving", reason=self._reason)
            await asyncio.sleep(LOOK_EVERY_S)

    async def look(self) -> None:
        """Ask once."""
        try:
            self._is_open = self._must_ask_for_keys and await self._asks_nobody()
            if self._is_open:
                self._reason = "the routers ask nobody for a key, and strangers can reach this gateway"
            else:
                self._reason = "" if await self.client.serving() else "no worker takes requests yet"
        except PdserveError as error:
            self._reason = str(error)

    async def _asks_nobody(self) -> bool:
        try:
            await self.client.status()
        except Unauthenticated:
            return False
        return True


class _GatewayVisit:
    def __init__(self, gateway: Gateway, call: Call) -> None:
        self._gateway = gateway
        self._client = gateway.client.with_metadata(call.metadata)
        self.asker = call.peer

    async def read(self, work: Callable[[], T], num_bytes: int) -> T:
        if num_bytes <= READ_AT_ONCE_BYTES:
            return work()
        async with self._gateway.threads:
            return await asyncio.to_thread(work)

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        return self._client.generate(request)

    async def tokenize(self, source: str | Chat) -> tuple[int, ...]:
        return await self._client.tokenize(source)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        return await self._client.detokenize(token_ids)

    async def token_bytes(self, token_ids: Sequence[int]) -> Sequence[bytes]:
        return await self._gateway.spelled.get(token_ids, self._client)

    async def model(self) -> ModelInfo:
        return await self._client.model()

    async def status(self, *, explain: bool = False) -> ClusterStatus:
        return await self._client.status(explain=explain)
