"""Whether a structure compiles within limits: tried in a child, remembered, and refused in words if it doesn't."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self

import structlog
from prometheus_client import CollectorRegistry

from pdserve.children.frames import Proven, ProveStructure
from pdserve.children.metrics import ChildMetrics
from pdserve.children.pool import End, JobEnded, Pool, PoolLimits
from pdserve.children.server_process import ServerProcess
from pdserve.children.shared_calls import SharedCalls, Spawn
from pdserve.clock import Clock
from pdserve.errors import (
    Failure,
    Incompatible,
    InvalidRequest,
    Overloaded,
    PdserveError,
    from_failure,
    to_failure,
)
from pdserve.grammar.cache import StructureCache
from pdserve.structure import Structure

log = structlog.get_logger()

QUICK_CPU_S = 0.25  # nearly all compile in much less, and must not wait behind those that don't
HOPELESS_S = 60.0  # what passed a limit is refused so long without another try
_SLOW_NICENESS = 5  # the rest gives way to those who are served


class Prover(Protocol):
    """Called on the event loop."""

    async def prove(self, structure: Structure) -> Proven:
        """Raises InvalidRequest: what is wrong and where, or the limit exceeded."""
        ...


Prove = Callable[[Structure, Callable[[Proven | PdserveError], None]], Callable[[], None]]
"""Called on the loop with a structure and what is called with the answer; returns what gives it up."""


def prove_inline(structure: Structure, done: Callable[[Proven | PdserveError], None]) -> Callable[[], None]:
    """As InlineProver."""
    done(Proven(0.0, structure.num_bytes))
    return lambda: None


def prove_in_task(prover: Prover, spawn: Spawn) -> Prove:
    """For whoever can't wait."""

    def prove(structure: Structure, done: Callable[[Proven | PdserveError], None]) -> Callable[[], None]:
        async def run() -> None:
            try:
                found: Proven | PdserveError = await prover.prove(structure)
            except PdserveError as error:
                found = error
            done(found)

        task = spawn(run())

        def give_up() -> None:
            task.cancel()

        return give_up

    return prove


class InlineProver:
    """Leaves it to whoever compiles next: for simulations, where no time passes and nobody is hostile."""

    async def prove(self, structure: Structure) -> Proven:
        return Proven(0.0, structure.num_bytes)


class ChildProver:
    """Use as `async with ChildProver(...) as prover`; children are ready soon after, and gone with it.

    Two lanes: each structure is tried for a moment; one that needs longer goes on in a child of its own.

    So a few that never end hold up neither the usual ones nor, as these children are nice, those who are served.

    server    ends with it
    spawn     begins a task in the owner's task group
    limit_s   for one structure, from when it has a child
    too_slow  the error of one that passes it
    """

    def __init__(
        self,
        server: ServerProcess,
        registry: CollectorRegistry,
        spawn: Spawn,
        clock: Clock,
        *,
        memory_bytes: int,
        limit_s: float,
        too_slow: Callable[[Structure], PdserveError],
    ) -> None:
        self._server = server
        self._spawn = spawn
        self._clock = clock
        self._limit_s = limit_s
        self._memory_bytes = memory_bytes
        self._too_slow = too_slow
        self._metrics = metrics = ChildMetrics(registry)
        quick = PoolLimits(num_children=2, most_waiting=256, memory_bytes=memory_bytes)
        slow = PoolLimits(num_children=1, most_waiting=8, memory_bytes=memory_bytes, niceness=_SLOW_NICENESS)
        self._quick = Pool(server, "structure", quick, metrics, clock)
        self._slow = Pool(server, "slow_structure", slow, metrics, clock)
        self._calls: SharedCalls[Structure, Proven] = SharedCalls(spawn)
        self._known: StructureCache[_Known] = StructureCache()

    async def __aenter__(self) -> Self:
        self._warming_up = self._spawn(self._warm_up())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._warming_up.cancel()
        self._quick.close()
        self._slow.close()
        self._server.close()

    async def _warm_up(self) -> None:
        """Have the children ready. If there can be none, those who need them are told, each time."""
        try:
            await self._quick.warm_up()
            await self._slow.warm_up()
        except Incompatible as error:
            log.error("children.not_started", reason=str(error))

    async def prove(self, structure: Structure) -> Proven:
        known = self._known.get(structure)
        is_known = known is not None and self._clock.now_s() < known.until_s
        if is_known or structure in self._calls:
            self._metrics.hits.labels(kind="structure").inc()
        if known is None or not is_known:
            return await self._calls.join(structure, lambda: self._prove(structure))
        if isinstance(known.found, Failure):
            raise from_failure(known.found)
        return known.found

    async def _prove(self, structure: Structure) -> Proven:
        try:
            proven = await self._try(structure)
        except JobEnded as ended:
            error = self._error(structure, ended)
            until_s = self._clock.now_s() + (HOPELESS_S if ended.end is not End.LOST else 0.0)
            self._known.put(structure, _Known(to_failure(error), until_s))
            raise error from None
        except InvalidRequest as error:
            self._known.put(structure, _Known(to_failure(error), math.inf))
            raise
        self._known.put(structure, _Known(proven, math.inf))
        return proven

    async def _try(self, structure: Structure) -> Proven:
        job = ProveStructure(structure.kind.value, structure.texts)
        try:
            return await self._quick.run(job, self._limit_s, QUICK_CPU_S)
        except JobEnded as ended:
            if ended.end is not End.TIME:
                raise
        return await self._slow.run(job, self._limit_s)

    def _error(self, structure: Structure, ended: JobEnded) -> PdserveError:
        name = structure.kind.value
        match ended.end:
            case End.TIME:
                return self._too_slow(structure)
            case End.MEMORY:
                return InvalidRequest(
                    f"{name} needs more memory to compile than children.memory_bytes",
                    limit_bytes=self._memory_bytes,
                )
            case End.CRASH:
                return InvalidRequest(f"{name} breaks the compiler", why=ended.words)
            case End.LOST:
                return Overloaded(f"the process that compiled {name} was ended from outside, twice")


@dataclass(frozen=True, slots=True)
class _Known:
    """until_s: then it is tried again."""

    found: Proven | Failure
    until_s: float
