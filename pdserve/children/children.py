"""All children of one process: a fork server, and lanes for each kind of job."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Self

import structlog
from prometheus_client import CollectorRegistry

from pdserve.children.lanes import Lanes
from pdserve.children.metrics import ChildMetrics
from pdserve.children.prover import ChildProver
from pdserve.children.renderer import ChildRenderer
from pdserve.children.server_process import ServerProcess
from pdserve.children.shared_calls import Spawn
from pdserve.clock import Clock
from pdserve.errors import Incompatible, InvalidRequest, PdserveError

log = structlog.get_logger()


class Children:
    """Use as `async with Children(...) as children`; they are ready soon after, and gone with it. Event loop only.

    registry      of their metrics
    spawn         begins a task in the owner's task group
    memory_bytes  for one job
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        spawn: Spawn,
        clock: Clock,
        environ: Mapping[str, str],
        *,
        memory_bytes: int,
    ) -> None:
        self.server = ServerProcess(clock, environ)
        self._metrics = ChildMetrics(registry)
        self._spawn = spawn
        self._clock = clock
        self._memory_bytes = memory_bytes
        self._lanes: list[Lanes] = []
        self._warming_up: list[asyncio.Task[None]] = []
        self._is_open = False

    def prover(
        self, limit_s: float, too_slow: Callable[[str, float], PdserveError] | None = None
    ) -> ChildProver:
        """For structures.

        limit_s   for one, from when it has a child
        too_slow  the error of one that passes it: its kind, the limit → error
        """
        return ChildProver(self._make("structure", limit_s, too_slow or _compiles_too_long), self._spawn)

    def renderer(self, limit_s: float) -> ChildRenderer:
        """For chats. limit_s: for one, from when it has a child."""
        return ChildRenderer(self._make("chat", limit_s, _renders_too_long))

    def _make(self, kind: str, limit_s: float, too_slow: Callable[[str, float], PdserveError]) -> Lanes:
        lanes = Lanes(
            self.server,
            kind,
            self._metrics,
            self._clock,
            memory_bytes=self._memory_bytes,
            limit_s=limit_s,
            too_slow=too_slow,
        )
        self._lanes.append(lanes)
        if self._is_open:
            self._warming_up.append(self._spawn(_warm_up(lanes)))
        return lanes

    async def __aenter__(self) -> Self:
        self._is_open = True
        self._warming_up = [self._spawn(_warm_up(lanes)) for lanes in self._lanes]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._warming_up:
            task.cancel()
        for lanes in self._lanes:
            lanes.close()
        self.server.close()


async def _warm_up(lanes: Lanes) -> None:
    """Have them ready. If there can be none, those who need them are told, each time."""
    try:
        await lanes.warm_up()
    except Incompatible as error:
        log.error("children.not_started", reason=str(error))


def _compiles_too_long(kind: str, limit_s: float) -> PdserveError:
    return InvalidRequest(f"{kind} takes longer to compile than children.compile_s", limit_s=limit_s)


def _renders_too_long(subject: str, limit_s: float) -> PdserveError:
    return InvalidRequest(f"{subject} takes longer than children.render_s", limit_s=limit_s)
