"""Links over CUDA IPC, on devices that keep and check its rules: mapping, copies under way, deaths, failures."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from structlog.testing import capture_logs

from kv_transfer import messages
from pdserve.errors import InvariantViolated, RequestCancelled, WorkerLost
from tests.contract.links.world import (
    LAYOUT,
    Node,
    World,
    assert_at_rest,
    assert_handed_off,
    facts,
    link_states,
)
from tests.support.loop_cuda_ipc import LoopCudaIpc

NUM_BLOCKS = 12
_NO_HANDLE = "invalid device context"


@pytest.fixture
def world() -> Iterator[World]:
    world = World("cuda_ipc")
    yield world
    world.close()


def _device(world: World, node: Node) -> LoopCudaIpc:
    return [device for device in world.ipc.devices if device.name == node.ref.id][-1]


def _hand_off(
    world: World,
    prefill: Node,
    decode: Node,
    lease_id: int,
    transport: str = "cuda_ipc",
    num_blocks: int = NUM_BLOCKS,
) -> None:
    sent = world.hand_off(prefill, decode, lease_id, num_blocks)
    world.wait_ends(lease_id, prefill, decode)
    assert_handed_off(prefill, decode, lease_id, sent)
    [handed_off] = decode.events(messages.HandedOff, lease_id)
    assert handed_off.transport == transport


def _copying(world: World) -> tuple[Node, Node]:
    """A pair with lease 1 in the middle of its copies, which stand still from here on."""
    prefill, decode = world.node("p"), world.node("d")
    world.pair(prefill, decode)
    world.hand_off(prefill, decode, 1, NUM_BLOCKS)
    world.run(lambda: _device(world, decode).num_under_way > 1)
    _device(world, decode).copy_takes_s = 0.3
    return prefill, decode


def _released(world: World, decode: Node) -> None:
    [retired] = decode.events(messages.Retired, 1)
    assert retired.quarantine and not decode.events(messages.LeaseReleased), "the device may still write"
    world.run(lambda: decode.events(messages.LeaseReleased) == [messages.LeaseReleased(1)], for_s=5.0)
    assert _device(world, decode).num_under_way == 0


# --- mapping


def test_the_decode_worker_reads_and_the_prefill_worker_sends_nothing(world: World) -> None:
    prefill, decode = world.node("p"), world.node("d")
    world.pair(prefill, decode)
    assert link_states(prefill, decode)[-1].transport == "cuda_ipc"
    _hand_off(world, prefill, decode, 1)
    assert prefill.owner.metrics.sent_bytes == 0
    assert decode.owner.metrics.received_bytes == NUM_BLOCKS * LAYOUT.block_bytes
    assert_at_rest(prefill, decode)


def test_a_pool_is_mapped_once_however_often_its_link_comes_up(world: World) -> None:
    """Also while copies over the last link are under way. Mapped twice would be refused."""
    prefill, decode = _copying(world)
    decode.owner._links[0].end(WorkerLost("the test ends it"))
    world.run(
        lambda: link_states(prefill, decode)[-1].generation == 2 and link_states(prefill, decode)[-1].up
    )
    assert len(_device(world, decode).mapped) == 1 and _device(world, decode).num_under_way
    _released(world, decode)
    _device(world, decode).copy_takes_s = None
    _hand_off(world, prefill, decode, 2)


def test_a_pool_that_nobody_reads_any_longer_is_unmapped(world: World) -> None:
    prefill, decode = world.node("p"), world.node("d")
    world.pair(prefill, decode)
    _hand_off(world, prefill, decode, 1)
    assert len(_device(world, decode).mapped) == 1
    world.kill(prefill)
    world.run(lambda: not _device(world, decode).mapped, for_s=1.0)


@pytest.mark.parametrize("strict", [False, True])
def test_what_cuda_says_is_what_the_operator_reads(world: World, strict: bool) -> None:
    prefill, decode = world.node("p", strict=strict), world.node("d", strict=strict)
    _device(world, decode).fails["open"] = _NO_HANDLE
    with capture_logs() as logs:
        world.order(prefill, decode)
        world.run(lambda: bool(link_states(prefill, decode)))
    if strict:
        assert _NO_HANDLE in link_states(prefill, decode)[0].reason
        return
    told = [line["because"] for line in logs if line["event"] == "link.fell_back"]
    assert len(told) == 2 and all(_NO_HANDLE in each for each in told)
    assert prefill.owner.metrics.fell_back == {"d": 1} and decode.owner.metrics.fell_back == {"p": 1}
    _hand_off(world, prefill, decode, 1, "stream-unix")


@pytest.mark.parametrize(("kinds", "want"), [(("cuda_ipc", "nccl", "stream"), "nccl"),
                                             (("cuda_ipc", "stream"), "stream-unix")])  # fmt: skip
def test_a_gpu_that_isnt_visible_here_is_reached_in_the_next_way(
    world: World, kinds: tuple[str, ...], want: str
) -> None:
    world.ipc.is_visible = lambda source, target: False
    prefill, decode = (world.node(name, link_facts=facts(transports=kinds)) for name in "pd")
    with capture_logs() as logs:
        world.pair(prefill, decode)
    told = [line["because"] for line in logs if line["event"] == "link.fell_back"]
    assert len(told) == 2 and all("isn't visible here" in each for each in told)
    _hand_off(world, prefill, decode, 1, want)


def test_between_hosts_it_is_nccl_and_no_failure(world: World) -> None:
    said = facts(transports=("cuda_ipc", "nccl", "stream"))
    prefill, decode = (world.node(name, link_facts=said, prefer_unix=False, strict=True) for name in "pd")
    with capture_logs() as logs:
        world.pair(prefill, decode)
    assert not [line for line in logs if line["event"] == "link.fell_back"]
    _hand_off(world, prefill, decode, 1, "nccl")


def test_nothing_left_to_try_is_said_with_what_failed(world: World) -> None:
    world.ipc.is_visible = lambda source, target: False
    only = facts(transports=("cuda_ipc",))
    prefill, decode = (world.node(name, link_facts=only) for name in "pd")
    world.order(prefill, decode)
    world.run(lambda: bool(link_states(prefill, decode)))
    assert "isn't visible here" in link_states(prefill, decode)[0].reason


# --- copies under way


def test_an_aborted_lease_keeps_its_blocks_until_its_copies_are_over(world: World) -> None:
    prefill, decode = _copying(world)
    decode.owner.handle(messages.EndLease(1, RequestCancelled("gone")))
    assert not prefill.ends(1)
    _released(world, decode)
    world.wait_ends(1, prefill, for_s=1.0)
    _device(world, decode).copy_takes_s = None
    _hand_off(world, prefill, decode, 2)


def test_a_withdrawn_lease_keeps_its_blocks_until_nobody_reads_them(world: World) -> None:
    prefill, decode = _copying(world)
    prefill.owner.handle(messages.WithdrawLease(1, RequestCancelled("gone")))
    world.wait_ends(1, decode, for_s=0.1)
    assert not prefill.ends(1), "D's device reads them"
    _released(world, decode)
    world.wait_ends(1, prefill, for_s=1.0)


def test_a_prefill_worker_that_dies_in_mid_copy(world: World) -> None:
    """Its pool stays mapped until the copies are over; then the next process of that id is a peer as any."""
    prefill, decode = _copying(world)
    world.kill(prefill)
    world.wait_ends(1, decode, for_s=0.1)
    assert len(_device(world, decode).mapped) == 1
    _released(world, decode)
    world.run(lambda: not _device(world, decode).mapped, for_s=1.0)
    _device(world, decode).copy_takes_s = None
    after = world.node("p", start_ns=2)
    world.pair(after, decode)
    _hand_off(world, after, decode, 2)


def test_a_device_that_fails_with_its_peer_ends_the_process(world: World) -> None:
    """The driver of an owner that raises ends with code 4: its context is broken, and another process starts."""
    prefill, decode = _copying(world)
    _device(world, decode).fails_with_peer = True
    world.kill(prefill)
    with pytest.raises(InvariantViolated, match="the device failed"):
        world.sleep(2.0)
    assert not decode.events(messages.LeaseReleased)
    decode.is_gone = True


def test_a_copy_that_doesnt_end_ends_the_process(world: World) -> None:
    _prefill, decode = _copying(world)
    _device(world, decode).copy_takes_s = 60.0
    with pytest.raises(InvariantViolated, match="doesn't end"):
        world.sleep(8.0)
    decode.is_gone = True


def test_a_process_that_was_stopped_doesnt_take_its_own_time_for_the_devices(world: World) -> None:
    """Continued after longer than lease_s, it sees copies that may end any moment."""
    _prefill, decode = _copying(world)
    decode.is_stopped = True
    _device(world, decode).copy_takes_s = 9.0
    world.sleep(7.0)
    assert _device(world, decode).num_under_way
    decode.is_stopped = False
    _device(world, decode).copy_takes_s = 0.001
    world.wait_ends(1, decode, for_s=1.0)
    _released(world, decode)


@pytest.mark.parametrize("nth", [1, 5])
def test_a_copy_that_cant_begin_fails_its_link(world: World, nth: int) -> None:
    """Also where others of the same turn had begun: their blocks are free when these are over."""
    prefill, decode = world.node("p"), world.node("d", piece_bytes=4096, pull_window_bytes=1 << 20)
    world.pair(prefill, decode)
    for lease_id in (1, 2):
        world.hand_off(prefill, decode, lease_id, NUM_BLOCKS)
    world.run(lambda: _device(world, decode).num_under_way >= nth)
    _device(world, decode).fails["copy"] = "an error of the test"
    world.wait_ends(1, prefill, decode, for_s=1.0)
    world.wait_ends(2, prefill, decode, for_s=1.0)
    for lease_id in (1, 2):
        [end] = decode.ends(lease_id)
        assert isinstance(end, messages.Retired) and isinstance(end.error, WorkerLost)
    quarantined = {event.lease_id for event in decode.events(messages.Retired) if event.quarantine}
    assert quarantined
    world.run(
        lambda: {event.lease_id for event in decode.events(messages.LeaseReleased)} == quarantined, for_s=1.0
    )
    world.run(lambda: link_states(prefill, decode)[-1].up, for_s=20.0)
    assert link_states(prefill, decode)[-1].generation == 2
    _hand_off(world, prefill, decode, 3)
    assert len(decode.owner._links) == 1, "the link that failed is forgotten"


def test_an_event_that_cant_be_recorded_ends_the_process(world: World) -> None:
    """Nobody would know when the copies before it are over."""
    prefill, decode = world.node("p"), world.node("d")
    world.pair(prefill, decode)
    _device(world, decode).fails["record"] = "an error of the test"
    world.hand_off(prefill, decode, 1, NUM_BLOCKS)
    with pytest.raises(InvariantViolated, match="the device failed"):
        world.sleep(1.0)
    decode.is_gone = True


def test_a_decode_worker_that_dies_in_mid_copy(world: World) -> None:
    prefill, decode = _copying(world)
    world.kill(decode)
    world.wait_ends(1, prefill, for_s=1.0)
    after = world.node("d", start_ns=2)
    world.pair(prefill, after)
    _hand_off(world, prefill, after, 2)
