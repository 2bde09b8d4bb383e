"""Jobs for children: users in turn, whatever one of them sends."""

from __future__ import annotations

import asyncio

import pytest

from pdserve.children.fair_places import FairPlaces, Place
from pdserve.errors import Overloaded


def _called(places: FairPlaces, waiting: dict[str, Place]) -> list[str]:
    order: list[str] = []
    while places.call_next():
        order += [name for name, place in waiting.items() if place.done() and name not in order]
    return order


async def test_users_come_in_turn_each_in_the_order_in_which_it_asked() -> None:
    places = FairPlaces(100, "structure")
    waiting = {f"a{index}": places.wait("alice") for index in range(5)}
    waiting |= {f"b{index}": places.wait("bob") for index in range(2)}
    waiting["c0"] = places.wait("carol")
    assert _called(places, waiting) == ["a0", "b0", "c0", "a1", "b1", "a2", "a3", "a4"]


async def test_who_has_most_waiting_makes_room_for_another_and_nobody_for_who_has_as_many() -> None:
    places = FairPlaces(4, "structure")
    waiting = {f"a{index}": places.wait("alice") for index in range(4)}
    with pytest.raises(Overloaded):
        places.wait("alice")
    waiting |= {f"b{index}": places.wait("bob") for index in range(2)}
    for name in ("a3", "a2"):
        with pytest.raises(Overloaded):
            await waiting.pop(name)
    with pytest.raises(Overloaded):
        places.wait("bob")
    assert _called(places, waiting) == ["a0", "b0", "a1", "b1"]


async def test_who_has_gone_takes_no_turn() -> None:
    places = FairPlaces(2, "structure")
    first, second = places.wait("alice"), places.wait("bob")
    first.cancel()
    third = places.wait("carol")
    assert places.call_next() and second.done() and not third.done()
    assert places.call_next() and third.done()
    assert not places.call_next()
    await asyncio.sleep(0)
