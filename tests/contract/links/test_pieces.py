"""Pieces that come twice, in another order, or with wrong bytes."""

from __future__ import annotations

import pytest

from kv_transfer import messages
from kv_transfer.frames import Kind
from pdserve.errors import KvCorrupt
from tests.contract.links.world import (
    DIVERTING,
    LAYOUT,
    World,
    assert_at_rest,
    assert_handed_off,
    link_states,
)
from tests.support.faulty_link import Action, Fault, OnKind


class EveryData:
    """The same fault for every piece, from the n-th on."""

    def __init__(self, action: Action, *, only: int | None = None) -> None:
        self._action = action
        self._only = only
        self._num_seen = 0

    def decide(self, kind: Kind, _index: int) -> Action | None:
        if kind is not Kind.DATA:
            return None
        self._num_seen += 1
        return self._action if self._only is None or self._num_seen <= self._only else None


TWO_SIDED = (*DIVERTING, "posted")


def _world(transport: str, fault: Fault) -> World:
    return World(transport, faults=lambda name, _dialled: fault if name == "p" else None)


@pytest.mark.parametrize("transport", DIVERTING)
@pytest.mark.parametrize("action", [Action.DUPLICATE, Action.REORDER, Action.DELAY])
@pytest.mark.parametrize("only", [1, None])
def test_each_piece_counts_once_whatever_its_way(transport: str, action: Action, only: int | None) -> None:
    world = _world(transport, EveryData(action, only=only))
    prefill, decode = world.node("p"), world.node("d")
    world.pair(prefill, decode)
    sent = world.hand_off(prefill, decode, 1, num_blocks=5)
    world.wait_ends(1, prefill, decode)
    assert_handed_off(prefill, decode, 1, sent)
    assert decode.owner.metrics.received_bytes == 5 * LAYOUT.block_bytes
    if action is Action.DUPLICATE:
        world.sleep(0.1)
        assert decode.owner.metrics.stale["p", "DATA"] >= 1
    assert link_states(prefill, decode)[-1].up
    world.close()


@pytest.mark.parametrize("transport", TWO_SIDED)
def test_a_corrupt_piece_is_fetched_once_more(transport: str) -> None:
    world = _world(transport, OnKind(Kind.DATA, Action.CORRUPT, nth=2))
    prefill, decode = world.node("p"), world.node("d")
    world.pair(prefill, decode)
    sent = world.hand_off(prefill, decode, 1, num_blocks=5)
    world.wait_ends(1, prefill, decode)
    assert_handed_off(prefill, decode, 1, sent)
    assert decode.owner.metrics.corrupt == {"p": 1}
    world.close()


@pytest.mark.parametrize("transport", TWO_SIDED)
def test_a_piece_that_is_corrupt_twice_ends_its_lease(transport: str) -> None:
    world = _world(transport, EveryData(Action.CORRUPT))
    prefill, decode = world.node("p"), world.node("d")
    world.pair(prefill, decode)
    world.hand_off(prefill, decode, 1, num_blocks=1)
    world.wait_ends(1, prefill, decode)
    for node in (prefill, decode):
        [end] = node.ends(1)
        assert isinstance(end, messages.LeaseClosed | messages.Retired)
        assert isinstance(end.error, KvCorrupt)
    assert link_states(prefill, decode)[-1].up
    world.settle()
    assert_at_rest(prefill, decode)
    world.close()


@pytest.mark.parametrize("transport", TWO_SIDED)
@pytest.mark.parametrize("kind", [Kind.READY, Kind.PULL, Kind.COMMIT, Kind.ACK, Kind.CONFIRM])
def test_a_flipped_bit_in_control_ends_the_link(transport: str, kind: Kind) -> None:
    """It can't change what a frame means."""
    who = "d" if kind in (Kind.PULL, Kind.ACK) else "p"
    world = World(
        transport, faults=lambda name, _dialled: OnKind(kind, Action.CORRUPT) if name == who else None
    )
    prefill, decode = world.node("p"), world.node("d")
    world.pair(prefill, decode)
    world.hand_off(prefill, decode, 1, num_blocks=3)
    world.wait_ends(1, prefill, decode)
    [end] = decode.ends(1)
    assert isinstance(end, messages.Retired)
    world.run(lambda: any(not state.up for state in link_states(prefill, decode)))
    reasons = [state.reason for state in link_states(prefill, decode) if not state.up]
    assert "field=sum" in reasons[0]
    world.close()
