"""What happens to the workers of a cluster while requests run, one thing after another."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from random import Random

from pdserve.messages import Role
from pdserve.operator_client import OperatorClient
from tests.support.asking import status_of
from tests.support.singles import Single, Singles
from tests.support.waiting import until

STOPPED_S = 4.0  # longer than a session may be silent, so that the others give up on it


class Churn:
    """Each thing is done to its end; afterwards all workers are there again.

    flags    of the workers that join
    spared   ids of workers that keep running: they may be stopped and change their roles, but don't end
    """

    def __init__(
        self,
        cluster: Singles,
        operator: OperatorClient,
        random: Random,
        flags: tuple[str, ...],
        *,
        spared: Collection[str] = (),
        stops: bool = False,
    ) -> None:
        self._cluster = cluster
        self._operator = operator
        self._random = random
        self._flags = flags
        self._spared = spared
        self._num_joined = 0
        self._things: dict[str, Callable[[Single], Awaitable[None]]] = {
            "kill": self._kill,
            "leave": self._leave,
            "join": self._join,
            "role": self._change_role,
        }
        if stops:
            self._things["stop"] = self._stop
        self._due: list[tuple[str, str]] = []
        self.done: Counter[str] = Counter()

    async def go_on(self) -> None:
        """One more thing. Each comes once to workers of each role before any comes again."""
        if not self._due:
            self._due = [(what, role) for what in self._things for role in ("prefill", "decode")]
            self._random.shuffle(self._due)
        what, role = self._due.pop()
        spared = self._spared if what in ("kill", "leave") else ()
        workers = [each for each in self._cluster.workers if each.role == role and each.id not in spared]
        await self._things[what](self._random.choice(workers))
        self.done[f"{what} {role}"] += 1

    async def _kill(self, worker: Single) -> None:
        await asyncio.to_thread(worker.kill)
        await self._back(worker)

    async def _leave(self, worker: Single) -> None:
        assert await asyncio.to_thread(worker.terminate) == 0
        await self._back(worker)

    async def _back(self, worker: Single) -> None:
        """Ready is a worker that one of several routers knows; the operator may ask another one."""
        await worker.start().ready()
        await until(f"{worker.id} is back", lambda: self._serves_as(worker, Role(worker.role)))

    async def _join(self, like: Single) -> None:
        """A worker that nobody has seen before comes, and goes again."""
        self._num_joined += 1
        new = self._cluster.worker(like.role, f"new-{self._num_joined}", *self._flags)
        await new.start().ready()
        assert await asyncio.to_thread(new.terminate) == 0
        del self._cluster.all[new.id]

    async def _change_role(self, worker: Single) -> None:
        """There and back."""
        own, other = Role(worker.role), Role.DECODE if worker.role == "prefill" else Role.PREFILL
        for role in (other, own):
            await self._operator.set_role(worker.id, role)
            await until(f"{worker.id} has joined as {role}", lambda role=role: self._serves_as(worker, role))  # type: ignore[misc]

    async def _stop(self, worker: Single) -> None:
        with worker.stopped():
            await asyncio.sleep(STOPPED_S)
        await until(f"{worker.id} is up again", lambda: self._serves_as(worker, Role(worker.role)))

    async def _serves_as(self, worker: Single, role: Role) -> bool:
        status = await status_of(
            self._operator
        )  # whom the next thing is asked of: routers learn one after another
        return status is not None and any(
            each.id == worker.id and each.role == role.value and each.state == "up" for each in status.workers
        )
