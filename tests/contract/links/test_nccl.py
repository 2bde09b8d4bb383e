"""Links over NCCL, on devices that keep and check its rules: joining, groups, failures of every call, aborts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from structlog.testing import capture_logs

from kv_transfer import messages
from pdserve.books import BooksWrong
from pdserve.errors import InvariantViolated, RequestCancelled, WorkerLost
from tests.contract.links.world import Node, World, assert_at_rest, assert_handed_off, link_states
from tests.support.loop_nccl import LoopNccl

NUM_BLOCKS = 12
_NO_DRIVER = "CUDA driver version is insufficient for CUDA runtime version"


@pytest.fixture
def world() -> Iterator[World]:
    world = World("nccl")
    yield world
    world.close()


def _device(world: World, node: Node) -> LoopNccl:
    return [device for device in world.fabric.devices if device.name == node.ref.id][-1]


def _hand_off(world: World, prefill: Node, decode: Node, lease_id: int, transport: str = "nccl") -> None:
    sent = world.hand_off(prefill, decode, lease_id, NUM_BLOCKS)
    world.wait_ends(lease_id, prefill, decode)
    assert_handed_off(prefill, decode, lease_id, sent)
    [handed_off] = decode.events(messages.HandedOff, lease_id)
    assert handed_off.transport == transport


def _is_receiving(world: World, decode: Node) -> bool:
    """Whether receives lie on its device."""
    return any(_device(world, decode).lanes.values())


def _up_again(world: World, prefill: Node, decode: Node, generation: int) -> None:
    world.run(lambda: link_states(prefill, decode)[-1].up, for_s=20.0)
    assert link_states(prefill, decode)[-1].generation == generation


# --- joining


def test_pieces_go_over_a_communicator_of_the_pair(world: World) -> None:
    prefill, decode = world.node("p"), world.node("d")
    world.pair(prefill, decode)
    assert link_states(prefill, decode)[-1].transport == "nccl"
    _hand_off(world, prefill, decode, 1)
    assert [len(_device(world, node).comms) for node in (prefill, decode)] == [1, 1]


@pytest.mark.parametrize(("who", "call"), [("p", "init"), ("d", "init"), ("d", "make_unique_id"), ("p", "is_settled"),
                                           ("d", "is_settled")])  # fmt: skip
@pytest.mark.parametrize("strict", [False, True])
def test_what_nccl_says_is_what_the_operator_reads(world: World, who: str, call: str, strict: bool) -> None:
    prefill, decode = world.node("p", strict=strict), world.node("d", strict=strict)
    _device(world, prefill if who == "p" else decode).fails[call] = _NO_DRIVER
    with capture_logs() as logs:
        world.order(prefill, decode)
        world.run(lambda: bool(link_states(prefill, decode)))
    if strict:
        assert _NO_DRIVER in link_states(prefill, decode)[0].reason
        return
    told = [line["because"] for line in logs if line["event"] == "link.fell_back"]
    assert len(told) == 2 and all(_NO_DRIVER in each for each in told)
    assert prefill.owner.metrics.fell_back == {"d": 1} and decode.owner.metrics.fell_back == {"p": 1}
    _hand_off(world, prefill, decode, 1, "stream-unix")
    world.sleep(1.0)
    assert not any(_device(world, node).comms for node in (prefill, decode)), "what was begun is ended"


@pytest.mark.parametrize("who", ["p", "d"])
def test_a_worker_that_is_stopped_while_it_joins(world: World, who: str) -> None:
    """Neither end waits for ever; the pair comes up once both run."""
    prefill, decode = world.node("p"), world.node("d")
    stopped = prefill if who == "p" else decode
    world.order(prefill, decode)
    world.run(lambda: bool(_device(world, stopped).comms))
    stopped.is_stopped = True
    world.sleep(12.0)
    stopped.is_stopped = False
    world.run(lambda: bool(link_states(prefill, decode)) and link_states(prefill, decode)[-1].up, for_s=20.0)
    world.settle()
    transport = link_states(prefill, decode)[-1].transport
    _hand_off(world, prefill, decode, 1, transport)


def test_no_more_communicators_than_links(world: World) -> None:
    first, second, decode = world.node("p1"), world.node("p2"), world.node("d", max_links=1)
    world.pair(first, decode)
    world.order(second, decode)
    world.run(lambda: bool(link_states(second, decode)))
    assert link_states(second, decode)[-1].reason == "full"
    world.kill(first)
    world.run(lambda: link_states(second, decode)[-1].up, for_s=20.0)
    _hand_off(world, second, decode, 1)


# --- groups


def test_many_workers_never_wait_in_a_circle(world: World) -> None:
    """Each decode worker receives from every prefill worker, all at once."""
    prefills = [world.node(f"p{index}", max_links=4) for index in range(3)]
    decodes = [world.node(f"d{index}", max_links=4) for index in range(3)]
    pairs = [(prefill, decode) for prefill in prefills for decode in decodes]
    for prefill, decode in pairs:
        world.pair(prefill, decode)
    sent = [
        world.hand_off(prefill, decode, lease_id, num_blocks=6)
        for lease_id, (prefill, decode) in enumerate(pairs, 1)
    ]
    for lease_id, (prefill, decode) in enumerate(pairs, 1):
        world.wait_ends(lease_id, prefill, decode)
        assert_handed_off(prefill, decode, lease_id, sent[lease_id - 1])
    assert_at_rest(*prefills, *decodes)


def test_a_stopped_prefill_worker_delays_the_others_for_less_than_lease_s(world: World) -> None:
    """Its receives hold the device until they are given up."""
    stopped, other, decode = world.node("p1"), world.node("p2"), world.node("d")
    for prefill in (stopped, other):
        world.pair(prefill, decode)
    world.hand_off(stopped, decode, 1, NUM_BLOCKS)
    world.run(lambda: _is_receiving(world, decode))
    stopped.is_stopped = True
    sent = world.hand_off(other, decode, 2, NUM_BLOCKS)
    world.wait_ends(2, other, decode, for_s=3.1)
    assert_handed_off(other, decode, 2, sent)


@pytest.mark.parametrize(
    ("who", "call"),
    [("d", call) for call in ("begin_group", "receive", "end_group", "record", "is_over", "is_settled")]
    + [("p", call) for call in ("begin_group", "send", "end_group", "record", "is_over", "is_settled")],
)
def test_a_failed_post_is_noticed(world: World, who: str, call: str) -> None:
    """Whatever fails, and wherever: the leases of the link fail, and the pair goes on under a new generation."""
    prefill, decode = world.node("p"), world.node("d")
    world.pair(prefill, decode)
    world.hand_off(prefill, decode, 1, NUM_BLOCKS)
    _device(world, prefill if who == "p" else decode).fails[call] = "unhandled system error"
    world.wait_ends(1, prefill, decode, for_s=1.0)
    for node in (prefill, decode):
        [end] = node.ends(1)
        assert isinstance(end, messages.LeaseClosed | messages.Retired) and isinstance(end.error, WorkerLost)
    assert prefill.owner.metrics.confirmed_leases == 0
    world.run(lambda: any("unhandled system error" in state.reason for state in link_states(prefill, decode))
              or who == "d")  # fmt: skip
    _up_again(world, prefill, decode, 2)
    _hand_off(world, prefill, decode, 2)


def test_a_hand_off_may_be_confirmed_before_the_sender_sees_the_end_of_its_sends(world: World) -> None:
    """The blocks stay until then, the books add up all the time."""
    prefill, decode = world.node("p"), world.node("d")
    world.pair(prefill, decode)
    _device(world, prefill).end_takes_s = 0.3
    sent = world.hand_off(prefill, decode, 1, num_blocks=2)
    world.wait_ends(1, decode)
    assert not prefill.ends(1), "its device may still read"
    world.wait_ends(1, prefill)
    assert_handed_off(prefill, decode, 1, sent)
    assert prefill.owner.metrics.confirmed_leases == 1
    assert not [told for told in prefill.to_loop if isinstance(told, BooksWrong)]


# --- the end of the other side


@pytest.mark.parametrize("point", range(1, 40, 3))
def test_a_decode_worker_outlives_every_restart_of_a_prefill_worker(world: World, point: int) -> None:
    """Killed after so many turns of a hand-off, the next process of that id is a peer as any."""
    decode = world.node("d")
    for start_ns in (1, 2, 3):
        prefill = world.node("p", start_ns=start_ns)
        world.pair(prefill, decode)
        world.hand_off(prefill, decode, start_ns, NUM_BLOCKS)
        for _ in range(point):
            world._turns()
            if world._due:
                world.clock.advance_to(max(world._due[0][0], world.clock.now_s()))
        world.kill(prefill)
        world.wait_ends(start_ns, decode, for_s=1.0)
    after = world.node("p", start_ns=4)
    world.pair(after, decode)
    decode.next_block = 0
    _hand_off(world, after, decode, 4)
    world.run(lambda: len(_device(world, decode).comms) == 1)


def test_blocks_of_a_load_that_was_aborted_are_free_again(world: World) -> None:
    """In its middle, by D's engine: quarantined until what was asked for has come."""
    prefill, decode = world.node("p"), world.node("d")
    world.pair(prefill, decode)
    world.hand_off(prefill, decode, 1, NUM_BLOCKS)
    world.run(lambda: _is_receiving(world, decode))
    decode.owner.handle(messages.EndLease(1, RequestCancelled("gone")))
    [retired] = decode.events(messages.Retired, 1)
    assert retired.quarantine
    world.run(lambda: decode.events(messages.LeaseReleased) == [messages.LeaseReleased(1)], for_s=1.0)
    world.wait_ends(1, prefill)
    _hand_off(world, prefill, decode, 2)


def test_blocks_of_a_load_whose_sender_has_died_are_free_when_its_communicator_is(world: World) -> None:
    prefill, decode = world.node("p"), world.node("d")
    world.pair(prefill, decode)
    world.hand_off(prefill, decode, 1, NUM_BLOCKS)
    world.run(lambda: _is_receiving(world, decode))
    _device(world, decode).abort_takes_s = 1.0
    world.kill(prefill)
    world.wait_ends(1, decode, for_s=0.5)
    [retired] = decode.events(messages.Retired, 1)
    assert retired.quarantine
    world.sleep(0.5)
    assert not decode.events(messages.LeaseReleased), "the device might still write"
    world.run(lambda: decode.events(messages.LeaseReleased) == [messages.LeaseReleased(1)], for_s=1.0)


def test_an_abort_may_have_to_wait_for_other_pairs_kernels(world: World) -> None:
    """It ends when these are given up, which is in time."""
    silent, other, decode = world.node("p1"), world.node("p2"), world.node("d")
    for prefill in (silent, other):
        world.pair(prefill, decode)
    world.hand_off(silent, decode, 1, NUM_BLOCKS)
    world.run(lambda: _is_receiving(world, decode))
    silent.is_stopped = True
    world.kill(other)
    world.sleep(2.5)
    assert len(_device(world, decode).comms) == 2, "the kernel of the first blocks the abort of the second"
    world.run(lambda: not _device(world, decode).comms, for_s=1.0)


def test_a_device_that_can_free_nothing_ends_the_process(world: World) -> None:
    """After lease_s nobody knows what it may still write: the driver of an owner that raises ends with code 4."""
    prefill, decode = world.node("p"), world.node("d")
    world.pair(prefill, decode)
    world.hand_off(prefill, decode, 1, NUM_BLOCKS)
    world.run(lambda: _is_receiving(world, decode))
    _device(world, decode).abort_takes_s = 60.0
    world.kill(prefill)
    with pytest.raises(InvariantViolated, match="can't be freed"):
        world.sleep(6.0)
    assert not decode.events(messages.LeaseReleased)
    decode.is_gone = True
