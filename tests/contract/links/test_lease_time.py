"""lease_s: an answer of one lease stays away; that lease ends, at both ends, and the link lives on."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from kv_transfer import messages
from kv_transfer.frames import Kind
from pdserve.errors import PdserveError, Stale, WorkerLost
from pdserve.service.config import TimeoutsConfig
from tests.contract.links.conftest import MakeWorld
from tests.contract.links.world import DIVERTING, Node, assert_at_rest, assert_handed_off, link_states
from tests.support.faulty_link import Action, Fault, OnKind

LOST = {
    Kind.READY: "p",
    Kind.PULL: "d",
    Kind.DATA: "p",
    Kind.COMMIT: "p",
    Kind.ACK: "d",
    Kind.CONFIRM: "p",
}
OF_PIECES = (Kind.PULL, Kind.DATA)


def _error(node: Node) -> PdserveError | None:
    [end] = node.ends(1)
    return None if isinstance(end, messages.HandedOff) else end.error  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", list(LOST))
def test_a_lost_frame_ends_its_lease_and_no_other(make_world: MakeWorld, kind: Kind) -> None:
    def lose(name: str, _dialled: bool) -> Fault | None:
        return OnKind(kind, Action.DROP) if name == LOST[kind] else None

    world = make_world(faults=lose)
    prefill, decode = world.node("p"), world.node("d")
    world.pair(prefill, decode)
    began_s = world.clock.now_s()
    sent = world.hand_off(prefill, decode, 1, num_blocks=3)
    world.wait_ends(1, prefill, decode, for_s=12.0)
    if kind in OF_PIECES and world.transport not in DIVERTING:
        assert_handed_off(prefill, decode, 1, sent)
        return
    assert world.clock.now_s() - began_s <= 7.0
    if kind is Kind.CONFIRM:
        assert _error(prefill) is None
    else:
        assert isinstance(_error(prefill), WorkerLost)
    assert isinstance(_error(decode), WorkerLost)
    assert link_states(prefill, decode)[-1].up
    assert len(link_states(prefill, decode)) == 1
    assert_at_rest(prefill, decode)
    again = world.hand_off(prefill, decode, 2, num_blocks=3)
    world.wait_ends(2, prefill, decode)
    assert_handed_off(prefill, decode, 2, again)


PATIENT = TimeoutsConfig(lease_s=50.0, handoff_s=60.0, token_gap_s=70.0)


@pytest.mark.parametrize(
    ("kind", "waiting"),
    [
        (Kind.READY, "d"),
        (Kind.PULL, "d"),
        (Kind.DATA, "d"),
        (Kind.CONFIRM, "d"),
        (Kind.READY, "p"),
        (Kind.PULL, "p"),
        (Kind.COMMIT, "p"),
        (Kind.ACK, "p"),
    ],
)
def test_each_end_ends_what_it_waits_for_in_vain(make_world: MakeWorld, kind: Kind, waiting: str) -> None:
    """The other end would wait far longer; it is told."""

    def lose(name: str, _dialled: bool) -> Fault | None:
        return OnKind(kind, Action.DROP) if name == LOST[kind] else None

    world = make_world(faults=lose)
    prefill = world.node("p", timeouts=None if waiting == "p" else PATIENT)
    decode = world.node("d", timeouts=None if waiting == "d" else PATIENT)
    world.pair(prefill, decode)
    if kind in OF_PIECES and world.transport not in DIVERTING:
        return
    world.hand_off(prefill, decode, 1, num_blocks=3)
    world.wait_ends(1, prefill, decode, for_s=12.0)
    assert isinstance(_error(decode), WorkerLost)


def test_a_pull_of_what_was_given_up_is_answered_at_once(make_world: MakeWorld) -> None:
    """Where the word of it was lost; D doesn't wait for lease_s."""

    def lose(name: str, _dialled: bool) -> Fault | None:
        return OnKind(Kind.WITHDRAW, Action.DROP) if name == "p" else None

    world = make_world(faults=lose)
    prefill, decode = world.node("p"), world.node("d")
    world.pair(prefill, decode)
    if world.reads_itself:
        return
    world.open(prefill, decode, 1, num_blocks=3)
    world.settle()
    world.offer(prefill, 1, upto=2, num_new=2)
    prefill.owner.handle(messages.WithdrawLease(1, WorkerLost("given up")))
    began_s = world.clock.now_s()
    world.wait_ends(1, prefill, decode)
    assert isinstance(_error(decode), Stale)
    assert world.clock.now_s() - began_s < 1.0


def test_waiting_for_the_engines_is_no_matter_of_the_link(make_world: MakeWorld) -> None:
    """The first READY, the next chunk: as long as they take. It is logged once that nothing moves."""
    world = make_world()
    prefill, decode = world.node("p"), world.node("d")
    world.pair(prefill, decode)
    with capture_logs() as logs:
        world.open(prefill, decode, 1, num_blocks=3)
        world.sleep(30.0)
        sent = world.offer(prefill, 1, upto=2, num_new=2)
        world.sleep(30.0)
    assert not prefill.ends(1) and not decode.ends(1)
    stuck = [(line["side"], line["state"]) for line in logs if line["event"] == "lease.stuck"]
    assert sorted(stuck) == [("decode", "granted"), ("decode", "pulling"), ("prefill", "open")]
    sent += world.offer(prefill, 1, upto=3, num_new=1)
    prefill.owner.handle(messages.CommitLease(1, 1, None))
    world.wait_ends(1, prefill, decode)
    assert_handed_off(prefill, decode, 1, sent)
