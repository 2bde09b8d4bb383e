"""Many leases on one slow link: each waits long for its turn, and none is lost by it."""

from __future__ import annotations

import pytest

from kv_transfer import messages
from pdserve.engine.layout import KvLayout
from tests.contract.links.world import Node, World, assert_at_rest, assert_handed_off

NUM_LEASES, NUM_BLOCKS = 100, 3
LAYOUT = KvLayout(
    num_blocks=512, kv_heads=2, layers=3, block_size=4, head_dim=64, dtype="float32", item_bytes=4
)
BYTES_PER_S = LAYOUT.block_bytes * 4
ALL_S = NUM_LEASES * NUM_BLOCKS / 4


def _begin(transport: str, *, window_blocks: int) -> tuple[World, Node, Node]:
    world = World(transport)
    prefill, decode = (
        world.node(
            name,
            layout=LAYOUT,
            piece_bytes=LAYOUT.block_bytes,
            pull_window_bytes=window_blocks * LAYOUT.block_bytes,
        )
        for name in ("p", "d")
    )
    world.pair(prefill, decode)
    world.wires.bytes_per_s = BYTES_PER_S
    return world, prefill, decode


@pytest.mark.parametrize("window_blocks", [4, 64])
@pytest.mark.parametrize("transport", ["memory", "posted"])
def test_a_hundred_leases_on_a_slow_link_are_all_handed_off(transport: str, window_blocks: int) -> None:
    """A round of all takes 25 s, five times lease_s; their order decides how long each waits between two pieces."""
    world, prefill, decode = _begin(transport, window_blocks=window_blocks)
    sent = {
        lease_id: world.hand_off(prefill, decode, lease_id, num_blocks=NUM_BLOCKS)
        for lease_id in range(1, NUM_LEASES + 1)
    }
    world.sleep(0.9 * ALL_S)
    assert len(decode.events(messages.HandedOff)) < NUM_LEASES, "the link was slow"
    world.sleep(0.3 * ALL_S)
    for lease_id, blocks in sent.items():
        assert_handed_off(prefill, decode, lease_id, blocks)
    assert_at_rest(prefill, decode)
    world.close()


def test_all_of_them_tell_their_routers_that_they_wait() -> None:
    """What the engine hears grows for each lease, at least once in 3 s, while the link moves for the others."""
    world, prefill, decode = _begin("memory", window_blocks=4)
    for lease_id in range(1, NUM_LEASES + 1):
        world.hand_off(prefill, decode, lease_id, num_blocks=NUM_BLOCKS)
    world.sleep(4.0)
    while not decode.events(messages.HandedOff):
        before = _progress(decode)
        world.sleep(3.0)
        after = _progress(decode)
        ended = {event.lease_id for event in decode.events(messages.HandedOff)}
        still = [lease for lease in before if lease not in ended and after[lease] == before[lease]]
        assert not still, f"nothing is said of {still}"
    world.close()


def _progress(decode: Node) -> dict[int, int]:
    said = {
        event.lease_id: event.num_received + event.num_waits for event in decode.events(messages.PullProgress)
    }
    return {lease_id: said.get(lease_id, -1) for lease_id in range(1, NUM_LEASES + 1)}
