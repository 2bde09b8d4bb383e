"""How leases end without a hand-off: every way, at every point, seen from both ends. Over every transport."""

from __future__ import annotations

import pytest

from kv_transfer import messages
from pdserve.errors import (
    InvariantViolated,
    LinkLost,
    PdserveError,
    RequestCancelled,
    Revoked,
    StepFailed,
    WorkerLost,
)
from tests.contract.links.conftest import MakeWorld
from tests.contract.links.world import (
    Node,
    World,
    assert_at_rest,
    assert_handed_off,
    link_states,
)
from tests.support.faulty_link import Action, Fault, Scripted

NUM_BLOCKS = 4
_MAX_POINTS = 400


def _error(node: Node, lease_id: int) -> PdserveError | None:
    """With what the lease ended at this node; None: confirmed or handed off."""
    [end] = node.ends(lease_id)
    if isinstance(end, messages.HandedOff):
        return None
    assert isinstance(end, messages.LeaseClosed | messages.Retired)
    return end.error


def _turn(world: World) -> None:
    """One turn of everybody; in memory, the next packet arrives."""
    world._turns()
    if world._due:
        world.clock.advance_to(max(world._due[0][0], world.clock.now_s()))


def test_the_decode_worker_says_which_link_it_has_lost(world: World) -> None:
    """Under a lease, and for a grant given after the end: a router must tell that link from the next one."""
    prefill, decode = world.node("p"), world.node("d")
    world.pair(prefill, decode)
    world.grant(prefill, decode, 1, NUM_BLOCKS)
    generation = link_states(prefill, decode)[-1].generation
    world.kill(prefill)
    world.wait_ends(1, decode)
    world.grant(prefill, decode, 2, NUM_BLOCKS)
    for lease_id in (1, 2):
        error = _error(decode, lease_id)
        assert isinstance(error, LinkLost) and error.generation == generation == 1
    stranger = world.node("p2")
    world.grant(stranger, decode, 3, NUM_BLOCKS)
    error = _error(decode, 3)
    assert isinstance(error, LinkLost) and error.generation == 0


@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_an_abort_at_every_point(make_world: MakeWorld, who: str) -> None:
    """After n turns one side gives up: each side closes once, and never the one without the other at P's cost."""
    world = make_world()
    prefill, decode = world.node("p"), world.node("d")
    world.pair(prefill, decode)
    for point in range(_MAX_POINTS):
        lease_id = point + 1
        prefill.next_block = decode.next_block = 0
        sent = world.hand_off(prefill, decode, lease_id, NUM_BLOCKS)
        for _ in range(point):
            _turn(world)
        is_over = bool(prefill.ends(lease_id)) and bool(decode.ends(lease_id))
        if who == "prefill":
            prefill.owner.handle(messages.WithdrawLease(lease_id, RequestCancelled("gone")))
        else:
            decode.owner.handle(messages.EndLease(lease_id, Revoked("taken back")))
            assert len(decode.ends(lease_id)) == 1, "the end of a lease at D takes no turn"
        world.wait_ends(lease_id, prefill, decode, for_s=1.0)
        if is_over:
            assert_handed_off(prefill, decode, lease_id, sent)
            assert point > 3
            break
        ends = (_error(prefill, lease_id), _error(decode, lease_id))
        assert ends[1] is None or not isinstance(ends[1], InvariantViolated)
        if ends[1] is None:
            assert ends[0] is None, "handed off without P's confirmation"
        if who == "prefill" and ends[0] is not None:
            assert isinstance(ends[1], RequestCancelled)
        assert link_states(prefill, decode)[-1].up, "the link outlives its leases"
    else:
        pytest.fail("the hand-off never completed")
    world.settle()
    assert_at_rest(prefill, decode)


@pytest.mark.parametrize("who", ["p", "d"])
def test_the_death_of_the_link_at_every_frame(make_world: MakeWorld, who: str) -> None:
    """The connection dies when the n-th frame of one side is sent; the link comes back, the next attempt works."""
    for index in range(_MAX_POINTS):
        plans: list[Fault] = [Scripted({index: Action.DIE})]

        def die_once(name: str, dialled: bool, plans: list[Fault] = plans) -> Fault | None:
            return plans.pop() if plans and name == who and dialled == (who == "p") else None

        world = make_world(faults=die_once)
        prefill, decode = world.node("p"), world.node("d")
        world.pair(prefill, decode)
        sent = world.hand_off(prefill, decode, 1, NUM_BLOCKS)
        world.wait_ends(1, prefill, decode, for_s=5.0)
        ends = (_error(prefill, 1), _error(decode, 1))
        if ends[1] is None:
            assert ends[0] is None
        else:
            assert isinstance(ends[1], WorkerLost)
        if ends == (None, None):
            assert_handed_off(prefill, decode, 1, sent)
        if all(state.up for state in link_states(prefill, decode)):
            break
        world.run(lambda: link_states(prefill, decode)[-1].up, for_s=10.0)  # noqa: B023
        again = world.hand_off(prefill, decode, 2, NUM_BLOCKS)
        world.wait_ends(2, prefill, decode)
        assert_handed_off(prefill, decode, 2, again)
        world.close()
        world.nodes.clear()
    assert index >= 3, "the plan never struck in mid-hand-off"


def test_withdraw_tells_decode_why(world: World) -> None:
    prefill, decode = world.node("p"), world.node("d")
    world.pair(prefill, decode)
    world.open(prefill, decode, 1, NUM_BLOCKS)
    world.offer(prefill, 1, upto=2, num_new=2)
    world.settle()
    prefill.owner.handle(messages.WithdrawLease(1, StepFailed("the step raised", strikes=1)))
    world.wait_ends(1, prefill, decode)
    error = _error(decode, 1)
    assert isinstance(error, StepFailed) and error.fields == {"strikes": "1"}
    [closed] = prefill.ends(1)
    assert isinstance(closed, messages.LeaseClosed) and not closed.link_lost


def test_withdraw_before_anything_was_offered(world: World) -> None:
    prefill, decode = world.node("p"), world.node("d")
    world.pair(prefill, decode)
    world.open(prefill, decode, 1, NUM_BLOCKS)
    prefill.owner.handle(messages.WithdrawLease(1, RequestCancelled("gone")))
    assert len(prefill.ends(1)) == 1, "nothing was offered, nothing can be read: closed at once"
    world.wait_ends(1, decode)
    assert isinstance(_error(decode, 1), RequestCancelled)


def test_fail_tells_prefill_why(world: World) -> None:
    prefill, decode = world.node("p"), world.node("d")
    world.pair(prefill, decode)
    world.open(prefill, decode, 1, NUM_BLOCKS)
    world.offer(prefill, 1, upto=2, num_new=2)
    world.settle()
    decode.owner.handle(messages.EndLease(1, Revoked("older sequences need the blocks")))
    world.wait_ends(1, prefill, decode)
    assert isinstance(_error(prefill, 1), Revoked)
    assert isinstance(_error(decode, 1), Revoked)


def test_fail_of_a_lease_that_prefill_hasnt_opened_yet(world: World) -> None:
    prefill, decode = world.node("p"), world.node("d")
    world.pair(prefill, decode)
    world.grant(prefill, decode, 1, NUM_BLOCKS)
    decode.owner.handle(messages.EndLease(1, Revoked("taken back")))
    world.sleep(0.5)
    prefill.owner.handle(messages.OpenLease(1, decode.ref, NUM_BLOCKS, 0))
    assert isinstance(_error(prefill, 1), Revoked)


def test_the_end_of_a_lease_that_is_over_is_no_error(world: World) -> None:
    prefill, decode = world.node("p"), world.node("d")
    world.pair(prefill, decode)
    sent = world.hand_off(prefill, decode, 1, NUM_BLOCKS)
    world.wait_ends(1, prefill, decode)
    decode.owner.handle(messages.EndLease(1, RequestCancelled("gone")))
    prefill.owner.handle(messages.WithdrawLease(1, RequestCancelled("gone")))
    prefill.owner.handle(messages.Offer(1, NUM_BLOCKS, ()))
    prefill.owner.handle(messages.CommitLease(1, 1, None))
    world.settle()
    assert_handed_off(prefill, decode, 1, sent)


def test_nothing_is_written_after_retired(make_world: MakeWorld) -> None:
    """D ends the lease in mid-pull: its blocks may hold anything from that moment on, and keep it."""
    world = make_world()
    prefill, decode = world.node("p"), world.node("d")
    world.pair(prefill, decode)
    world.hand_off(prefill, decode, 1, num_blocks=12)
    world.run(lambda: bool(decode.events(messages.PullProgress, 1)))
    decode.owner.handle(messages.EndLease(1, RequestCancelled("gone")))
    [retired] = decode.events(messages.Retired, 1)
    if retired.quarantine:
        world.run(lambda: decode.events(messages.LeaseReleased) == [messages.LeaseReleased(1)], for_s=1.0)
    for block_id in decode.granted[1]:
        decode.fill(block_id, b"\x5a" * decode.layout.block_bytes)
    world.wait_ends(1, prefill)
    world.settle()
    assert all(
        decode.block(block_id) == b"\x5a" * decode.layout.block_bytes for block_id in decode.granted[1]
    )


def test_nothing_is_read_after_lease_closed(make_world: MakeWorld) -> None:
    """P ends the lease in mid-send and reuses its blocks at once: what D gets is either right or never counts."""
    world = make_world()
    prefill, decode = world.node("p"), world.node("d")
    world.pair(prefill, decode)
    blocks = world.hand_off(prefill, decode, 1, num_blocks=12)
    world.run(lambda: bool(decode.events(messages.PullProgress, 1)))
    prefill.owner.handle(messages.WithdrawLease(1, RequestCancelled("gone")))
    world.wait_ends(1, prefill)
    for block_id in blocks:
        prefill.fill(block_id, b"\x5a" * prefill.layout.block_bytes)
    world.wait_ends(1, decode)
    assert isinstance(_error(decode, 1), RequestCancelled)
    assert decode.owner.metrics.corrupt == {}


def test_a_commit_of_another_size_is_a_bug_of_that_lease_only(world: World) -> None:
    prefill, decode = world.node("p"), world.node("d")
    world.pair(prefill, decode)
    world.grant(prefill, decode, 1, num_blocks=5)
    prefill.owner.handle(messages.OpenLease(1, decode.ref, 4, 0))
    world.offer(prefill, 1, upto=4, num_new=4)
    prefill.owner.handle(messages.CommitLease(1, 1, None))
    world.wait_ends(1, prefill, decode)
    error = _error(decode, 1)
    assert isinstance(error, InvariantViolated) and error.fields["want"] == 5 and error.fields["got"] == 4
    assert isinstance(_error(prefill, 1), InvariantViolated)
    sent = world.hand_off(prefill, decode, 2, NUM_BLOCKS)
    world.wait_ends(2, prefill, decode)
    assert_handed_off(prefill, decode, 2, sent)


def test_more_offered_than_granted_is_a_bug_of_that_lease_only(world: World) -> None:
    prefill, decode = world.node("p"), world.node("d")
    world.pair(prefill, decode)
    world.grant(prefill, decode, 1, num_blocks=3)
    prefill.owner.handle(messages.OpenLease(1, decode.ref, 4, 0))
    world.offer(prefill, 1, upto=4, num_new=4)
    world.wait_ends(1, prefill, decode)
    assert isinstance(_error(decode, 1), InvariantViolated)


@pytest.mark.parametrize(
    ("offer", "commit"),
    [(messages.Offer(1, 3, (5,)), False), (messages.Offer(1, 9, (5,) * 9), False), (None, True)],
)
def test_an_engine_that_offers_nonsense_loses_that_lease_only(
    make_world: MakeWorld, offer: messages.Offer | None, commit: bool
) -> None:
    world = make_world()
    prefill, decode = world.node("p"), world.node("d")
    world.pair(prefill, decode)
    world.open(prefill, decode, 1, NUM_BLOCKS)
    if offer is not None:
        prefill.owner.handle(offer)
    if commit:
        prefill.owner.handle(messages.CommitLease(1, 1, None))
    world.wait_ends(1, prefill, decode)
    assert isinstance(_error(prefill, 1), InvariantViolated)
    assert isinstance(_error(decode, 1), InvariantViolated)


@pytest.mark.parametrize("block_id", [64, -1])
def test_an_engine_that_grants_blocks_outside_of_its_pool_loses_that_lease_only(
    make_world: MakeWorld, block_id: int
) -> None:
    world = make_world()
    prefill, decode = world.node("p"), world.node("d")
    world.pair(prefill, decode)
    decode.owner.handle(messages.ExpectLease(1, prefill.ref, 0, (1, 2, 3, block_id)))
    assert isinstance(_error(decode, 1), InvariantViolated)
    sent = world.hand_off(prefill, decode, 2, NUM_BLOCKS)
    world.wait_ends(2, prefill, decode)
    assert_handed_off(prefill, decode, 2, sent)


def test_a_lease_without_a_link_ends_at_once(make_world: MakeWorld) -> None:
    world = make_world()
    prefill, decode = world.node("p"), world.node("d")
    world.open(prefill, decode, 1, NUM_BLOCKS)
    assert isinstance(_error(prefill, 1), WorkerLost)
    assert isinstance(_error(decode, 1), WorkerLost)
    [closed] = prefill.ends(1)
    assert isinstance(closed, messages.LeaseClosed) and closed.link_lost


def test_prefill_killed_ends_the_lease_at_decode_at_once(make_world: MakeWorld) -> None:
    world = make_world()
    prefill, decode = world.node("p"), world.node("d")
    world.pair(prefill, decode)
    world.open(prefill, decode, 1, NUM_BLOCKS)
    world.settle()
    world.kill(prefill)
    world.wait_ends(1, decode, for_s=1.0)
    assert isinstance(_error(decode, 1), WorkerLost)


def test_decode_killed_ends_the_lease_at_prefill_at_once(make_world: MakeWorld) -> None:
    world = make_world()
    prefill, decode = world.node("p"), world.node("d")
    world.pair(prefill, decode)
    world.open(prefill, decode, 1, NUM_BLOCKS)
    world.offer(prefill, 1, upto=2, num_new=2)
    world.settle()
    world.kill(decode)
    world.wait_ends(1, prefill, for_s=1.0)
    assert isinstance(_error(prefill, 1), WorkerLost)
    [closed] = prefill.ends(1)
    assert isinstance(closed, messages.LeaseClosed) and closed.link_lost
