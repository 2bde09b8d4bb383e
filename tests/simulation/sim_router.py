"""One simulated router process."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from router.app import RouterApp
from router.work import InlineWork

if TYPE_CHECKING:
    from tests.simulation.cluster import SimCluster


class SimRouter:
    """May be killed, drained and restarted under its id."""

    def __init__(self, cluster: SimCluster, router_id: str) -> None:
        self.id = router_id
        self.app: RouterApp | None = None
        self.clock = cluster.clock_for(f"router {router_id}")
        self._cluster = cluster
        self._num_starts = 0
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, unless it runs; the app is there when the task has run."""
        if self._task is not None and not self._task.done() and not self._task.cancelling():
            return
        self._stop = asyncio.Event()
        self._num_starts += 1
        self._task = self._cluster.tasks.create_task(self._run())

    async def _run(self) -> None:
        cluster = self._cluster
        app = RouterApp(
            cluster.config,
            self.clock,
            cluster.random_for(f"{self.id}/{self._num_starts}"),
            work=InlineWork(),
            router_id=self.id,
            tokenizer=cluster.tokenizer,
            tracer=cluster.tracer,
            on_serving=lambda serving: cluster.observer.on_serving(self.id, serving),
        )
        try:
            async with app:
                self.app = app
                await self._stop.wait()
                self.app = None
        finally:
            self.app = None
            cluster.observer.on_serving(self.id, False)

    def kill(self) -> None:
        """Its sessions end, its clients see their streams end."""
        self.app = None
        self._cluster.fabric.kill(router_id=self.id)
        if self._task is not None:
            self._task.cancel()

    async def drain(self) -> None:
        """As on SIGTERM: serve what runs, then end."""
        app, task = self.app, self._task
        if app is not None and task is not None:
            await app.drain()
            self._stop.set()
            await asyncio.wait((task,))
