"""The routers of a cluster over their address for operators: asked for their status, told what was decided."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Self, TypeVar

import structlog

from deploy.scaling.decide import Decision
from pdserve.errors import NoWorker, PdserveError
from pdserve.messages import Role
from pdserve.operator_client import OperatorClient
from pdserve.status import ClusterStatus, ScalingNote

log = structlog.get_logger()

T = TypeVar("T")

_ANSWER_S = 2.0


class OperatorRouters:
    """One event loop; an async context manager. Implements `Routers`.

    connect  HOST:PORT of a router's `workers_listen` → a client that proves who it is
    """

    def __init__(self, targets: Sequence[str], connect: Callable[[str], OperatorClient]) -> None:
        self._connect = connect
        self._clients: dict[str, OperatorClient] = {}
        self._silent: frozenset[str] = frozenset()
        self._targets = tuple(targets)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.follow(())

    async def follow(self, targets: Sequence[str]) -> None:
        """These are the routers from now on."""
        self._targets = tuple(targets)
        gone = [client for target, client in self._clients.items() if target not in targets]
        self._clients = {target: client for target, client in self._clients.items() if target in targets}
        for client in gone:
            await client.close()

    async def ask(self) -> Sequence[ClusterStatus | None]:
        """See `Routers`."""
        answers = await self._each(lambda client: client.status())
        silent = frozenset(
            target for target, answer in zip(self._targets, answers, strict=True) if answer is None
        )
        for target in sorted(silent - self._silent):
            log.warning("scaling.router_silent", router=target)
        self._silent = silent
        return answers

    async def tell(self, decision: Decision) -> None:
        """Tell all that can be reached; an older one doesn't know of it."""
        note = ScalingNote(
            num_prefill=decision.counts.prefill,
            num_decode=decision.counts.decode,
            why=decision.why,
            change=decision.change,
        )
        await self._each(lambda client: client.note_scaling(note))

    async def set_role(self, worker_id: str, role: Role) -> None:
        """Ask one after the other for it. Raises what the last one said."""
        said: PdserveError = NoWorker("no router is known")
        for target in self._targets:
            try:
                await self._client(target).set_role(worker_id, role)
                return
            except PdserveError as error:
                said = error
        raise said

    async def _each(self, ask: Callable[[OperatorClient], Awaitable[T]]) -> list[T | None]:
        """What all say, at once; None for one that doesn't answer in time, or not this."""
        return await asyncio.gather(*(self._one(target, ask) for target in self._targets))

    async def _one(self, target: str, ask: Callable[[OperatorClient], Awaitable[T]]) -> T | None:
        try:
            async with asyncio.timeout(_ANSWER_S):
                return await ask(self._client(target))
        except (PdserveError, TimeoutError):
            return None

    def _client(self, target: str) -> OperatorClient:
        if target not in self._clients:
            self._clients[target] = self._connect(target)
        return self._clients[target]
