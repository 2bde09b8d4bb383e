"""Whether a structure compiles within limits: tried in a child, remembered, and refused in words if it doesn't."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pdserve.children.frames import Proven, ProveStructure
from pdserve.children.lanes import Lanes
from pdserve.children.shared_calls import SharedCalls, Spawn
from pdserve.errors import Failure, InvalidRequest, PdserveError, from_failure, to_failure
from pdserve.grammar.cache import StructureCache
from pdserve.structure import Structure


class Prover(Protocol):
    """Called on the event loop."""

    async def prove(self, structure: Structure, user: str) -> Proven:
        """In this user's turn. Raises InvalidRequest: what is wrong and where, or the limit exceeded."""
        ...


Prove = Callable[[Structure, Callable[[Proven | PdserveError], None]], Callable[[], None]]
"""Called on the loop with a structure and what is called with the answer; returns what gives it up."""


def prove_inline(structure: Structure, done: Callable[[Proven | PdserveError], None]) -> Callable[[], None]:
    """As InlineProver."""
    done(Proven(0.0, structure.num_bytes))
    return lambda: None


def prove_in_task(prover: Prover, spawn: Spawn) -> Prove:
    """For whoever can't wait, nor knows of users."""

    def prove(structure: Structure, done: Callable[[Proven | PdserveError], None]) -> Callable[[], None]:
        async def run() -> None:
            try:
                found: Proven | PdserveError = await prover.prove(structure, "")
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

    async def prove(self, structure: Structure, user: str) -> Proven:
        return Proven(0.0, structure.num_bytes)


class ChildProver:
    """What compiled, or is wrong, is remembered.

    spawn  begins a task in the owner's task group
    """

    def __init__(self, lanes: Lanes, spawn: Spawn) -> None:
        self._lanes = lanes
        self._calls: SharedCalls[Structure, Proven] = SharedCalls(spawn)
        self._known: StructureCache[Proven | Failure] = StructureCache()

    async def prove(self, structure: Structure, user: str) -> Proven:
        known = self._known.get(structure)
        if known is not None or structure in self._calls:
            self._lanes.hits.inc()
        if known is None:
            return await self._calls.join(structure, lambda: self._prove(structure, user))
        if isinstance(known, Failure):
            raise from_failure(known)
        return known

    async def _prove(self, structure: Structure, user: str) -> Proven:
        job = ProveStructure(structure.kind.value, structure.texts)
        try:
            proven = await self._lanes.run(structure, structure.kind.value, job, user)
        except InvalidRequest as error:
            if not self._lanes.is_hopeless(structure):  # for a while only
                self._known.put(structure, to_failure(error))
            raise
        assert isinstance(proven, Proven), "the answer to this job"
        self._known.put(structure, proven)
        return proven
