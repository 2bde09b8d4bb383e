"""A whole hand-off, over every transport."""

from __future__ import annotations

import functools
import random

import pytest

from kv_transfer import messages
from pdserve.kv_memory import HostMemory
from pdserve.sampling import TokenLogprobs
from tests.contract.links.conftest import MakeWorld
from tests.contract.links.world import LAYOUT, World, assert_at_rest, assert_handed_off, link_states


def test_all_bytes_arrive_and_both_sides_agree(world: World) -> None:
    prefill, decode = world.node("p"), world.node("d")
    world.pair(prefill, decode)
    sent = world.hand_off(prefill, decode, 11, num_blocks=5)
    world.wait_ends(11, prefill, decode)
    assert_handed_off(prefill, decode, 11, sent)
    assert prefill.owner.metrics.confirmed_leases == decode.owner.metrics.handed_off_leases == 1
    assert prefill.owner.metrics.sent_bytes >= (0 if world.reads_itself else 5 * LAYOUT.block_bytes)
    assert decode.owner.metrics.received_bytes == 5 * LAYOUT.block_bytes
    assert_at_rest(prefill, decode)


def test_the_first_token_and_its_logprobs_travel_with_the_commit(world: World) -> None:
    prefill, decode = world.node("p"), world.node("d")
    world.pair(prefill, decode)
    world.open(prefill, decode, 3, num_blocks=1)
    world.offer(prefill, 3, upto=1, num_new=1)
    logprobs = TokenLogprobs(-0.5, ((9, -0.5), (4, -1.25)))
    prefill.owner.handle(messages.CommitLease(3, 9, logprobs))
    world.wait_ends(3, prefill, decode)
    [handed_off] = decode.ends(3)
    assert isinstance(handed_off, messages.HandedOff)
    assert (handed_off.first_token, handed_off.logprobs) == (9, logprobs)
    assert handed_off.transport == world.shown_as


def test_blocks_offered_while_later_chunks_run_are_pulled_at_once(world: World) -> None:
    prefill, decode = world.node("p"), world.node("d")
    world.pair(prefill, decode)
    world.open(prefill, decode, 5, num_blocks=7, num_skip=2)
    sent: tuple[int, ...] = ()
    for upto in (4, 6):
        sent += world.offer(prefill, 5, upto, num_new=2)
        progress = messages.PullProgress(5, num_received=upto - 2)
        world.run(functools.partial(decode.to_engine.__contains__, progress))
        assert not decode.ends(5)
    sent += world.offer(prefill, 5, upto=7, num_new=1)
    prefill.owner.handle(messages.CommitLease(5, 1, None))
    world.wait_ends(5, prefill, decode)
    assert_handed_off(prefill, decode, 5, sent)


def test_a_lease_of_which_decode_has_everything_needs_no_blocks(world: World) -> None:
    prefill, decode = world.node("p"), world.node("d")
    world.pair(prefill, decode)
    sent = world.hand_off(prefill, decode, 8, num_blocks=3, num_skip=3)
    world.wait_ends(8, prefill, decode)
    assert_handed_off(prefill, decode, 8, sent)
    assert decode.owner.metrics.received_bytes == 0


@pytest.mark.parametrize("seed", range(6))
def test_interleaved_leases_of_random_sizes(make_world: MakeWorld, seed: int) -> None:
    world = make_world(seed=seed)
    draw = random.Random(seed)
    prefill = world.node("p")
    decodes = [
        world.node(
            f"d{index}",
            piece_bytes=draw.choice([4096, 5000, 12_288, 16_384]),
            pull_window_bytes=draw.choice([1 << 20, 16_384]),
        )
        for index in range(2)
    ]
    for decode in decodes:
        world.pair(prefill, decode)
    sizes = {lease_id: draw.randint(0, 6) for lease_id in range(1, 9)}
    left = dict(sizes)
    sent: dict[int, tuple[int, ...]] = {}
    for lease_id, num_blocks in sizes.items():
        num_skip = draw.randint(0, 4)
        world.open(prefill, decodes[lease_id % 2], lease_id, num_blocks + num_skip, num_skip)
        sent[lease_id] = ()
        sizes[lease_id] = num_blocks + num_skip
    while left:
        lease_id = draw.choice(sorted(left))
        num_new = draw.randint(0, left[lease_id])
        left[lease_id] -= num_new
        sent[lease_id] += world.offer(prefill, lease_id, sizes[lease_id] - left[lease_id], num_new)
        if left[lease_id] == 0:
            prefill.owner.handle(messages.CommitLease(lease_id, lease_id, None))
            del left[lease_id]
        for _ in range(draw.randint(0, 3)):
            world._turns()
    for lease_id in sizes:
        world.wait_ends(lease_id, prefill, decodes[lease_id % 2])
        assert_handed_off(prefill, decodes[lease_id % 2], lease_id, sent[lease_id])


def test_leases_of_one_link_share_it_in_rotation(make_world: MakeWorld) -> None:
    world = make_world()
    prefill, decode = world.node("p"), world.node("d", piece_bytes=4096, pull_window_bytes=4096)
    world.pair(prefill, decode)
    decode.is_stopped = True
    long_blocks = world.hand_off(prefill, decode, 1, num_blocks=30)
    short_blocks = world.hand_off(prefill, decode, 2, num_blocks=2)
    world.settle()
    decode.is_stopped = False
    world.run(lambda: messages.PullProgress(2, num_received=2) in decode.to_engine)
    assert messages.PullProgress(1, num_received=10) not in decode.to_engine, "the short one had to wait"
    world.wait_ends(1, prefill, decode)
    world.wait_ends(2, prefill, decode)
    assert_handed_off(prefill, decode, 1, long_blocks)
    assert_handed_off(prefill, decode, 2, short_blocks)


def test_a_worker_may_be_at_both_ends(make_world: MakeWorld) -> None:
    world = make_world()
    one, two = world.node("one"), world.node("two")
    world.pair(one, two)
    world.pair(two, one)
    forth = world.hand_off(one, two, 1, num_blocks=4)
    back = world.hand_off(two, one, 2, num_blocks=4)
    world.wait_ends(1, one, two)
    world.wait_ends(2, one, two)
    assert_handed_off(one, two, 1, forth)
    assert_handed_off(two, one, 2, back)


def test_a_reader_that_stops_delays_only_itself(make_world: MakeWorld) -> None:
    world = make_world()
    prefill, slow, quick = world.node("p"), world.node("slow"), world.node("quick")
    world.pair(prefill, slow)
    world.pair(prefill, quick)
    slow_blocks = world.hand_off(prefill, slow, 1, num_blocks=12)
    world.run(lambda: slow.is_pulling(1))
    slow.is_stopped = True
    quick_blocks = world.hand_off(prefill, quick, 2, num_blocks=12)
    world.run(lambda: bool(quick.ends(2)), for_s=1.0)
    assert_handed_off(prefill, quick, 2, quick_blocks)
    slow.is_stopped = False
    world.wait_ends(1, prefill, slow)
    assert_handed_off(prefill, slow, 1, slow_blocks)
    assert link_states(prefill, slow)[-1].up


def test_the_news_of_a_grant_may_be_later_than_the_offer(make_world: MakeWorld) -> None:
    world = make_world()
    prefill, decode = world.node("p"), world.node("d")
    world.pair(prefill, decode)
    prefill.owner.handle(messages.OpenLease(4, decode.ref, 2, 0))
    sent = world.offer(prefill, 4, upto=2, num_new=2)
    prefill.owner.handle(messages.CommitLease(4, 1, None))
    world.settle()
    world.grant(prefill, decode, 4, num_blocks=2)
    world.wait_ends(4, prefill, decode)
    assert_handed_off(prefill, decode, 4, sent)


def test_a_grant_that_never_comes_is_answered_stale(make_world: MakeWorld) -> None:
    world = make_world()
    prefill, decode = world.node("p"), world.node("d")
    world.pair(prefill, decode)
    prefill.owner.handle(messages.OpenLease(4, decode.ref, 2, 0))
    world.offer(prefill, 4, upto=2, num_new=2)
    world.wait_ends(4, prefill, for_s=3.0)
    [closed] = prefill.ends(4)
    assert isinstance(closed, messages.LeaseClosed)
    assert type(closed.error).__name__ == "Stale"
    assert decode.owner.metrics.stale == {("p", "READY"): 1}


class _SlowToPopulate(HostMemory):
    """Needs so many turns for it; `asked` says up to where it was to be there, each time."""

    def __init__(self, num_bytes: int, num_turns: int) -> None:
        super().__init__(num_bytes)
        self.asked: list[int] = []
        self._num_left = num_turns

    def populate(self, end: int) -> bool:
        self.asked.append(end)
        self._num_left -= end > 0
        return end > 0 and self._num_left > 0


def test_granted_blocks_are_there_before_the_first_of_them_is_offered() -> None:
    """A bit in each turn that has nothing else to do, until nothing is left."""
    world = World("stream-unix")
    memory = _SlowToPopulate(LAYOUT.pool_bytes, 5)
    prefill, decode = world.node("p"), world.node("d", memory=memory)
    world.pair(prefill, decode)
    world.settle()
    assert set(memory.asked) == {0}
    memory.asked.clear()
    world.open(prefill, decode, 1, num_blocks=3)
    world.settle()
    end = (max(decode.granted[1]) + 1) * LAYOUT.block_bytes
    assert memory.asked[:5] == [end] * 5
    assert len(set(memory.asked)) == 1
    sent = world.offer(prefill, 1, 3, 3)
    prefill.owner.handle(messages.CommitLease(1, 7, None))
    world.wait_ends(1, prefill, decode)
    assert_handed_off(prefill, decode, 1, sent)
    world.close()
