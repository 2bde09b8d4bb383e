"""The API server forgets what an operator has not yet seen: its watches are answered with 410, and begin again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.kube.control_plane import IS_BUILT
from tests.support.kube.cut_off import Between
from tests.support.kube.world import CORE, SERVICES, World, running_world

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not IS_BUILT, reason="no control plane: `make k8s-control-plane` builds one"),
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    async with running_world(tmp_path_factory.mktemp("kube"), watch_cache=False) as made:
        yield made


async def test_what_was_missed_is_seen_in_the_same_life(world: World, tmp_path: Path) -> None:
    """Only a watch tells the operator of a new service; its own looks are at those that it knows."""
    async with Between(world.plane.server.removeprefix("https://")) as between:
        operator = await world.start_operator(f"https://localhost:{between.port}")
        await world.create("before")
        await world.settled("before")
        await between.cut()
        made = await world.create("missed")
        note = {"metadata": {"name": "later"}, "data": {}}
        later = await world.client.ask("POST", f"{CORE}/configmaps", note)
        revision = int(later["metadata"]["resourceVersion"])
        await world.plane.compact(revision)
        seen = int(made["metadata"]["resourceVersion"]) - 1  # the latest that it can have had
        assert await world.client.watch_error(f"{SERVICES}", seen) == 410
        between.mend()
        await world.settled("missed")
        await world.ask("missed")
        await world.change("before", routers={"replicas": 2})
        await world.settled("before")
        assert not operator.has_ended
        assert await operator.stop() == 0
