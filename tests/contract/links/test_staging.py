"""Links of a pool that the host can't see, over a stream: copies under way, slots, deaths, failures, mixed pairs."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from kv_transfer import messages
from kv_transfer.frames import Kind
from kv_transfer.transports.staging import Staging
from pdserve.errors import Incompatible, InvariantViolated, RequestCancelled, WorkerLost
from tests.contract.links.world import (
    LAYOUT,
    Node,
    World,
    assert_at_rest,
    assert_handed_off,
    link_states,
)
from tests.support.faulty_link import Action, Drawn, OnKind
from tests.support.loop_copies import LoopCopies
from tests.support.memories import DeviceMemory
from tests.support.virtual_clock import VirtualClock

NUM_BLOCKS = 12


@pytest.fixture
def world() -> Iterator[World]:
    world = World("staged")
    yield world
    world.close()


def _copies(world: World, node: Node) -> LoopCopies:
    return world.copies[node.ref.id]


def _hand_off(world: World, prefill: Node, decode: Node, lease_id: int, num_blocks: int = NUM_BLOCKS) -> None:
    sent = world.hand_off(prefill, decode, lease_id, num_blocks)
    world.wait_ends(lease_id, prefill, decode)
    assert_handed_off(prefill, decode, lease_id, sent)


def _released(world: World, decode: Node) -> None:
    [retired] = decode.events(messages.Retired, 1)
    assert retired.quarantine and not decode.events(messages.LeaseReleased), "the device may still write"
    world.run(lambda: decode.events(messages.LeaseReleased) == [messages.LeaseReleased(1)], for_s=5.0)


def _copying(world: World, role: str) -> tuple[Node, Node]:
    """A pair with lease 1 in the middle of the copies of this side, which stand still from here on."""
    prefill, decode = world.node("p"), world.node("d")
    world.pair(prefill, decode)
    slow = _copies(world, prefill if role == "p" else decode)
    world.hand_off(prefill, decode, 1, NUM_BLOCKS)
    world.run(lambda: slow.num_under_way > 1)
    slow.copy_takes_s = 0.3
    return prefill, decode


# --- pairs of a device and a CPU


@pytest.mark.parametrize("staged", ["p", "d", "pd"])
def test_a_device_and_a_cpu_are_a_pair_as_any(staged: str) -> None:
    """Either way. A piece that the link changes is noticed, whoever computes its checksum, and fetched again."""
    corrupting = OnKind(Kind.DATA, Action.CORRUPT, nth=2)
    world = World("stream-unix", faults=lambda name, _dialled: corrupting if name == "p" else None)
    prefill, decode = (world.node(name, is_staged=name in staged) for name in "pd")
    world.pair(prefill, decode)
    for lease_id in (1, 2):
        _hand_off(world, prefill, decode, lease_id)
    assert decode.owner.metrics.corrupt == {"p": 1}
    assert_at_rest(prefill, decode)
    world.close()


def test_a_piece_is_copied_to_the_pool_only_once_however_often_it_comes() -> None:
    """A copy of it that landed later could be written when its block is another's."""
    twice = Drawn(random.Random(3), {Action.DUPLICATE: 1.0})
    world = World("stream-unix", faults=lambda name, _dialled: twice if name == "p" else None)
    prefill, decode = (world.node(name, is_staged=True) for name in "pd")
    world.pair(prefill, decode)
    _copies(world, decode).copy_takes_s = 0.01
    _hand_off(world, prefill, decode, 1)
    num_pieces = decode.owner.metrics.received_pieces
    assert _copies(world, decode).num_copies == num_pieces == NUM_BLOCKS * -(-LAYOUT.block_bytes // 5000)
    world.close()


@pytest.mark.parametrize("transport", ["nccl", "cuda_ipc"])
def test_what_goes_from_device_to_device_isnt_staged(transport: str) -> None:
    """Though both offer the stream, and agree on the checksum that its pieces would have."""
    world = World(transport)
    prefill, decode = (world.node(name, is_staged=True) for name in "pd")
    world.pair(prefill, decode)
    _hand_off(world, prefill, decode, 1)
    assert decode.events(messages.HandedOff, 1)[0].transport == transport
    assert _copies(world, prefill).num_copies == _copies(world, decode).num_copies == 0
    world.close()


def test_devices_that_reach_each_other_in_no_other_way_stage() -> None:
    world = World("cuda_ipc")
    world.ipc.is_visible = lambda source, target: False
    prefill, decode = (world.node(name, is_staged=True) for name in "pd")
    world.pair(prefill, decode)
    _hand_off(world, prefill, decode, 1)
    assert decode.events(messages.HandedOff, 1)[0].transport == "stream-unix"
    assert _copies(world, prefill).num_copies == _copies(world, decode).num_copies > 0
    world.close()


# --- copies under way


def test_ready_blocks_count_only_when_their_copies_are_over(world: World) -> None:
    prefill, decode = _copying(world, "d")
    world.sleep(0.2)
    copies = _copies(world, decode)
    assert not decode.ends(1) and copies.num_under_way
    assert decode.owner.metrics.received_pieces == copies.num_copies - copies.num_under_way
    _copies(world, decode).copy_takes_s = None
    world.wait_ends(1, prefill, decode)
    assert isinstance(decode.ends(1)[0], messages.HandedOff)
    assert_at_rest(prefill, decode)


def test_an_aborted_lease_keeps_its_blocks_until_its_copies_are_over(world: World) -> None:
    prefill, decode = _copying(world, "d")
    decode.owner.handle(messages.EndLease(1, RequestCancelled("gone")))
    world.wait_ends(1, prefill, for_s=0.1)
    _released(world, decode)
    _copies(world, decode).copy_takes_s = None
    _hand_off(world, prefill, decode, 2)


def test_a_link_that_ends_under_copies_keeps_the_blocks_until_they_are_over(world: World) -> None:
    prefill, decode = _copying(world, "d")
    world.kill(prefill)
    world.wait_ends(1, decode, for_s=0.1)
    _released(world, decode)
    _copies(world, decode).copy_takes_s = None
    after = world.node("p", start_ns=2)
    world.pair(after, decode)
    _hand_off(world, after, decode, 2)
    assert len(decode.owner._links) == 1, "the link that ended is forgotten"


@pytest.mark.parametrize("how", ["withdrawn", "link"])
def test_prefill_lets_go_of_blocks_when_their_copies_are_over(world: World, how: str) -> None:
    prefill, decode = _copying(world, "p")
    if how == "withdrawn":
        prefill.owner.handle(messages.WithdrawLease(1, RequestCancelled("gone")))
    else:
        world.kill(decode)
    world.sleep(0.1)
    assert not prefill.ends(1), "the device reads them"
    world.wait_ends(1, prefill, for_s=5.0)
    assert _copies(world, prefill).num_under_way == 0
    if how == "withdrawn":
        world.wait_ends(1, decode)
        _copies(world, prefill).copy_takes_s = None
        _hand_off(world, prefill, decode, 2)


@pytest.mark.parametrize("role", ["p", "d"])
def test_a_device_that_fails_ends_the_process(world: World, role: str) -> None:
    """The driver of an owner that raises ends with code 4: nobody knows what the device did."""
    node = _copying(world, role)["pd".index(role)]
    _copies(world, node).has_failed = True
    with pytest.raises(InvariantViolated, match="the device failed"):
        world.sleep(2.0)
    assert not node.events(messages.LeaseReleased)
    node.is_gone = True


@pytest.mark.parametrize("role", ["p", "d"])
def test_a_copy_that_doesnt_end_ends_the_process(world: World, role: str) -> None:
    node = _copying(world, role)["pd".index(role)]
    _copies(world, node).copy_takes_s = 60.0
    with pytest.raises(InvariantViolated, match="doesn't end"):
        world.sleep(8.0)
    node.is_gone = True


def test_an_event_that_cant_be_recorded_ends_the_process(world: World) -> None:
    prefill, decode = world.node("p"), world.node("d")
    world.pair(prefill, decode)
    _copies(world, prefill).fails["record"] = "an error of the test"
    world.hand_off(prefill, decode, 1, NUM_BLOCKS)
    with pytest.raises(InvariantViolated, match="the device failed"):
        world.sleep(1.0)
    prefill.is_gone = True


@pytest.mark.parametrize(("role", "call"), [("p", "fetch"), ("d", "store")])
def test_a_copy_that_cant_begin_fails_its_link(world: World, role: str, call: str) -> None:
    prefill, decode = world.node("p"), world.node("d")
    world.pair(prefill, decode)
    node = prefill if role == "p" else decode
    world.hand_off(prefill, decode, 1, NUM_BLOCKS)
    world.run(lambda: _copies(world, node).num_under_way > 0)
    _copies(world, node).fails[call] = "an error of the test"
    world.wait_ends(1, prefill, decode, for_s=1.0)
    assert isinstance(decode.ends(1)[0].error, WorkerLost)  # type: ignore[attr-defined]
    world.run(lambda: link_states(prefill, decode)[-1].generation == 2, for_s=20.0)
    _hand_off(world, prefill, decode, 2)
    quarantined = [event.lease_id for event in decode.events(messages.Retired) if event.quarantine]
    assert [event.lease_id for event in decode.events(messages.LeaseReleased)] == quarantined


def test_a_process_that_was_stopped_doesnt_take_its_own_time_for_the_devices(world: World) -> None:
    _prefill, decode = _copying(world, "d")
    decode.is_stopped = True
    _copies(world, decode).copy_takes_s = 9.0
    world.sleep(7.0)
    assert _copies(world, decode).num_under_way
    decode.is_stopped = False
    _copies(world, decode).copy_takes_s = 0.001
    world.wait_ends(1, decode, for_s=1.0)
    _released(world, decode)


# --- slots


def test_peers_that_stand_still_leave_every_other_link_its_slot() -> None:
    """Three take nothing of what they asked for, from a prefill worker with eight slots for four links."""
    world = World("memory")  # whose connections take two pieces that nobody reads
    prefill = world.node("p", max_links=4, is_staged=True)
    decodes = [world.node(f"d{index}", pull_window_bytes=1 << 20) for index in range(4)]
    for decode in decodes:
        world.pair(prefill, decode)
    for lease_id, decode in enumerate(decodes[:3]):
        world.hand_off(prefill, decode, lease_id, num_blocks=NUM_BLOCKS)
        world.run(lambda decode=decode, lease_id=lease_id: decode.is_pulling(lease_id))  # type: ignore[misc]
        decode.is_stopped = True
    world.sleep(1.0)
    assert world.staging["p"].used_bytes >= 7 * LAYOUT.block_bytes, "they hold all that they may"
    sent = world.hand_off(prefill, decodes[3], 9, num_blocks=4)
    world.wait_ends(9, prefill, decodes[3], for_s=1.0)
    assert_handed_off(prefill, decodes[3], 9, sent)
    world.close()


def test_no_more_is_held_than_was_configured_and_nothing_at_rest() -> None:
    clock = VirtualClock()
    copies = LoopCopies(
        DeviceMemory(64 * 1024), schedule=lambda _s, _call: None, delay=float, wake=lambda: None
    )
    staging = Staging(copies, copies.memory, block_bytes=1024, staging_bytes=6 * 1024 + 7, max_links=4, clock=clock,
                      lease_s=5.0)  # fmt: skip
    assert len(copies.pinned) == 6 * 1024 and staging.used_bytes == 0
    taken = []
    while staging.room("a"):
        taken.append(staging.take("a", 100))
    assert len(taken) == 3, "one is kept for each of three others"
    assert staging.next_due_s() is None
    for name in "bcd":
        assert staging.room(name) == 1
        staging.take(name, 1024)
        assert staging.room(name) == 0
    assert staging.used_bytes == 6 * 1024 and len({slot.start for slot in taken}) == 3
    staging.give_back("a", taken[0])
    assert staging.next_due_s() == clock.now_s(), "somebody was refused, and should ask again"
    staging.poll()
    assert staging.next_due_s() is None and staging.room("b") == 1


def test_too_little_for_a_piece_of_each_link_is_said_in_figures() -> None:
    copies = LoopCopies(DeviceMemory(4096), schedule=lambda _s, _call: None, delay=float, wake=lambda: None)
    with pytest.raises(Incompatible, match=r"worker.max_links.*staging_bytes=3000, want=4096"):
        Staging(copies, copies.memory, block_bytes=1024, staging_bytes=3000, max_links=4, clock=VirtualClock(),
                lease_s=5.0)  # fmt: skip
