"""The transports that the link contract runs over, each also behind a faulty link that only delays and repeats."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from tests.contract.links.world import TRANSPORTS, FaultMaker, World
from tests.support.faulty_link import Action, Drawn, Fault

MakeWorld = Callable[..., World]


@pytest.fixture(params=TRANSPORTS)
def make_world(request: pytest.FixtureRequest) -> Iterator[MakeWorld]:
    """Worlds on one transport, closed afterwards."""
    worlds: list[World] = []

    def make(*, seed: int = 1, faults: FaultMaker | None = None) -> World:
        worlds.append(World(request.param, seed=seed, faults=faults))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


@pytest.fixture(params=[f"{name}{fault}" for name in TRANSPORTS for fault in ("", "+faulty")])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """A world on each transport, sound or behind a benignly faulty link."""
    transport, _, fault = request.param.partition("+")
    drawn = random.Random(request.param)

    def benign(_name: str, _dialled: bool) -> Fault:
        return Drawn(drawn, {Action.DELAY: 0.1, Action.DUPLICATE: 0.2})

    world = World(transport, faults=benign if fault else None)
    yield world
    world.close()
