"""A reader that goes on after the sender gave up and reused its blocks never runs on what it reads."""

from __future__ import annotations

import pytest

from kv_transfer import messages
from pdserve.errors import RequestCancelled
from tests.contract.links.world import Node, World, assert_handed_off, link_states

NUM_BLOCKS = 8


def _stop_in_mid_read(world: World) -> tuple[Node, Node, tuple[int, ...]]:
    """Everything is offered and committed; D has read some pieces, and is stopped between two."""
    prefill, decode = world.node("p"), world.node("d")
    world.pair(prefill, decode)
    blocks = world.hand_off(prefill, decode, 1, NUM_BLOCKS)
    world.run(lambda: bool(decode.events(messages.PullProgress, 1)))
    assert decode.events(messages.PullProgress, 1)[-1].num_received < NUM_BLOCKS
    decode.is_stopped = True
    return prefill, decode, blocks


def _reuse(prefill: Node, blocks: tuple[int, ...]) -> None:
    for block_id in blocks:
        prefill.fill(block_id, b"\x5a" * prefill.layout.block_bytes)


@pytest.mark.parametrize("copy_s", [None, 0.01])
@pytest.mark.parametrize("why", ["withdrawn", "silent"])
def test_a_late_reader_is_never_confirmed(why: str, copy_s: float | None) -> None:
    world = World("memory-one-sided")
    world.wires.copy_delay = None if copy_s is None else lambda: copy_s
    prefill, decode, blocks = _stop_in_mid_read(world)
    if why == "withdrawn":
        prefill.owner.handle(messages.WithdrawLease(1, _gone()))
        assert bool(prefill.ends(1)) is (copy_s is None), (
            "the blocks stay while D's device may read them, until it has let go or its link is gone"
        )
    world.wait_ends(1, prefill, for_s=6.0)
    [closed] = prefill.ends(1)
    assert isinstance(closed, messages.LeaseClosed) and closed.error is not None
    _reuse(prefill, blocks)
    decode.is_stopped = False
    world.wait_ends(1, decode, for_s=10.0)
    world.run(lambda: link_states(prefill, decode)[-1].up, for_s=10.0)
    [end] = decode.ends(1)
    assert isinstance(end, messages.Retired)
    world.close()


def test_a_late_reader_whose_link_lives_on_is_never_confirmed() -> None:
    """The worst case: D reads everything after P gave the lease up, before it reads a single frame."""
    world = World("memory-one-sided")
    prefill, decode, blocks = _stop_in_mid_read(world)
    [link] = decode.owner._links
    prefill.owner.handle(messages.WithdrawLease(1, _gone()))
    world.sleep(0.1)
    _reuse(prefill, blocks)
    assert link.side is not None
    for _ in range(200):
        link.side.turn()
    decode.is_stopped = False
    world.wait_ends(1, prefill, decode, for_s=1.0)
    [end] = decode.ends(1)
    assert isinstance(end, messages.Retired)
    assert prefill.owner.metrics.confirmed_leases == 0
    world.close()


def test_what_a_late_reader_acks_is_stale() -> None:
    """Its ACK arrives at P after the lease has ended there."""
    world = World("memory-one-sided")
    prefill, decode = world.node("p"), world.node("d")
    world.pair(prefill, decode)
    world.hand_off(prefill, decode, 1, NUM_BLOCKS)
    world.run(lambda: decode.owner._links[0].side.leases.live(1).state.value == "acked")  # type: ignore[union-attr]
    prefill.owner.handle(messages.WithdrawLease(1, _gone()))
    world.wait_ends(1, prefill, decode)
    world.settle()
    assert isinstance(decode.ends(1)[0], messages.Retired)
    assert prefill.owner.metrics.stale == {("d", "ACK"): 1}
    world.close()


def test_blocks_under_a_device_copy_are_quarantined_until_it_is_done() -> None:
    world = World("memory-one-sided")
    world.wires.copy_delay = lambda: 0.2
    prefill, decode = world.node("p"), world.node("d")
    world.pair(prefill, decode)
    world.hand_off(prefill, decode, 1, NUM_BLOCKS)
    world.run(lambda: decode.is_pulling(1))
    world.sleep(0.05)
    decode.owner.handle(messages.EndLease(1, _gone()))
    [retired] = decode.ends(1)
    assert isinstance(retired, messages.Retired) and retired.quarantine
    world.sleep(0.05)
    assert not decode.events(messages.LeaseReleased) and not prefill.ends(1)
    world.wait_ends(1, prefill, for_s=0.5)
    assert decode.events(messages.LeaseReleased) == [messages.LeaseReleased(1)]
    world.wires.copy_delay = None
    sent = world.hand_off(prefill, decode, 2, num_blocks=3)
    world.wait_ends(2, prefill, decode)
    assert_handed_off(prefill, decode, 2, sent)
    world.close()


def test_a_quarantine_outlives_its_link() -> None:
    world = World("memory-one-sided")
    world.wires.copy_delay = lambda: 0.2
    prefill, decode = world.node("p"), world.node("d")
    world.pair(prefill, decode)
    world.hand_off(prefill, decode, 1, NUM_BLOCKS)
    world.run(lambda: decode.is_pulling(1))
    world.sleep(0.05)
    world.kill(prefill)
    world.wait_ends(1, decode, for_s=0.1)
    [retired] = decode.ends(1)
    assert isinstance(retired, messages.Retired) and retired.quarantine
    assert not decode.events(messages.LeaseReleased)
    world.run(lambda: decode.events(messages.LeaseReleased) == [messages.LeaseReleased(1)], for_s=0.5)
    world.settle()
    assert not decode.owner._links
    world.close()


def _gone() -> RequestCancelled:
    return RequestCancelled("gone")
