"""Links: handshake, orders, replacement, keepalive, and what ends them. Over every transport."""

from __future__ import annotations

from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from kv_transfer import messages
from kv_transfer.link_facts import LinkFacts
from kv_transfer.wanted_links import UNWANTED_S
from pdserve.ids import Epoch, WorkerRef
from pdserve.wire_version import WIRE_VERSION
from tests.contract.links.conftest import MakeWorld
from tests.contract.links.world import LAYOUT, Node, World, assert_handed_off, facts, link_states


def _down_reason(world: World, prefill: Node, decode: Node) -> str:
    """Order the link, and say why it is down."""
    world.order(prefill, decode)
    world.run(lambda: bool(link_states(prefill, decode)))
    [state] = link_states(prefill, decode)
    assert not state.up
    return state.reason


MISFITS = [
    ("layout_json", facts(layout_json=replace(LAYOUT, head_dim=128).wire_json())),
    ("weights_fingerprint", facts(weights_fingerprint="other")),
    ("tokenizer_fingerprint", facts(tokenizer_fingerprint="other")),
    ("state_kinds", facts(state_kinds=("kv", "ssm"))),
    ("tp_rank", facts(tp_rank=1)),
    ("tp_size", facts(tp_size=2)),
    ("checksum", facts(checksum="crc32c")),
    ("wire", facts(wire=(WIRE_VERSION[0] + 1, 0))),
]


@pytest.mark.parametrize(("field", "others"), MISFITS, ids=[field for field, _ in MISFITS])
def test_a_misfit_names_the_field_and_both_values_at_both_ends(
    make_world: MakeWorld, field: str, others: LinkFacts
) -> None:
    world = make_world()
    prefill, decode = world.node("p"), world.node("d", link_facts=others)
    with capture_logs() as logs:
        reason = _down_reason(world, prefill, decode)
        world.sleep(10.0)
    name = "layout_json" if field == "layout_json" else field
    mine, theirs = getattr(facts(), name), getattr(others, name)
    words = [".".join(map(str, value)) if field == "wire" else str(value) for value in (mine, theirs)]
    told = [line["reason"] for line in logs if line["event"] == "link.down" and line["peer"] != "unknown"]
    assert len(told) == 2, "one try, told to both sides"
    for text in (reason, *told):
        assert f"field={field}" in text
        assert f"prefill={words[0]}" in text and f"decode={words[1]}" in text
    assert len(link_states(prefill, decode)) == 1


@pytest.mark.parametrize(
    ("mine", "theirs", "word"),
    [
        (b"a" * 32, b"b" * 32, "cluster.secret_file another"),
        (b"a" * 32, None, "prefill=set, decode=not set"),
        (None, b"a" * 32, "prefill=not set, decode=set"),
    ],
)
def test_a_wrong_secret_is_refused_without_being_told(
    make_world: MakeWorld, mine: bytes | None, theirs: bytes | None, word: str
) -> None:
    world = make_world()
    prefill, decode = world.node("p", secret=mine), world.node("d", secret=theirs)
    reason = _down_reason(world, prefill, decode)
    assert "cluster.secret_file" in reason and word in reason
    assert "aaaa" not in reason


def test_facts_are_compared_only_with_one_who_is_proven(make_world: MakeWorld) -> None:
    """Else whoever asks is told what it lacks, and its refusal would keep the pair down for good."""
    world = make_world()
    prefill = world.node("p", secret=b"a" * 32)
    decode = world.node("d", secret=b"b" * 32, link_facts=facts(weights_fingerprint="other"))
    with capture_logs() as logs:
        reason = _down_reason(world, prefill, decode)
        world.sleep(10.0)
    assert "not known here" in reason
    assert not any("weights_fingerprint" in line["reason"] for line in logs if line["event"] == "link.down")
    assert sum(line["event"] == "link.down" and line["side"] == "prefill" for line in logs) > 5, "tried again"


def test_one_secret_is_enough(world: World) -> None:
    prefill, decode = world.node("p", secret=b"s" * 32), world.node("d", secret=b"s" * 32)
    world.pair(prefill, decode)
    sent = world.hand_off(prefill, decode, 1, num_blocks=2)
    world.wait_ends(1, prefill, decode)
    assert_handed_off(prefill, decode, 1, sent)


@pytest.mark.parametrize("newer", ["p", "d"])
def test_a_version_speaks_with_the_one_before_it(make_world: MakeWorld, newer: str) -> None:
    world = make_world()
    later = facts(wire=(WIRE_VERSION[0], WIRE_VERSION[1] + 1))
    prefill, decode = (world.node(name, link_facts=later if name == newer else None) for name in ("p", "d"))
    with capture_logs() as logs:
        world.pair(prefill, decode)
    spoken = {line["wire"] for line in logs if line["event"] == "link.up"}
    assert spoken == {".".join(map(str, WIRE_VERSION))}
    sent = world.hand_off(prefill, decode, 1, num_blocks=2)
    world.wait_ends(1, prefill, decode)
    assert_handed_off(prefill, decode, 1, sent)


@pytest.mark.parametrize(
    ("prefill_kinds", "decode_kinds", "want"),
    [
        (("xxh3_64",), ("xxh3_64",), "xxh3_64"),
        (("crc32c", "xxh3_64"), ("xxh3_64",), "xxh3_64"),
        (("xxh3_64",), (), None),
        ((), ("xxh3_64",), None),
    ],
)
def test_pieces_carry_the_best_check_sum_that_both_know_or_none(
    make_world: MakeWorld, prefill_kinds: tuple[str, ...], decode_kinds: tuple[str, ...], want: str | None
) -> None:
    world = make_world()
    prefill = world.node("p", link_facts=facts(checksums=prefill_kinds))
    decode = world.node("d", link_facts=facts(checksums=decode_kinds))
    with capture_logs() as logs:
        world.pair(prefill, decode)
    assert {line["checksum"] for line in logs if line["event"] == "link.up"} == {want}
    sent = world.hand_off(prefill, decode, 1, num_blocks=3)
    world.wait_ends(1, prefill, decode)
    assert_handed_off(prefill, decode, 1, sent)


def test_pools_may_differ_in_size(make_world: MakeWorld) -> None:
    world = make_world()
    prefill, decode = world.node("p"), world.node("d", layout=replace(LAYOUT, num_blocks=33))
    world.pair(prefill, decode)
    sent = world.hand_off(prefill, decode, 1, num_blocks=4)
    world.wait_ends(1, prefill, decode)
    assert_handed_off(prefill, decode, 1, sent)


@pytest.mark.parametrize(("deterministic", "is_logged"), [(True, True), (False, False)])
def test_other_numerics_are_logged_where_equal_bits_are_promised(
    make_world: MakeWorld, deterministic: bool, is_logged: bool
) -> None:
    world = make_world()
    prefill = world.node("p", link_facts=facts(numerics="bf16/2", deterministic=deterministic))
    decode = world.node("d", link_facts=facts(numerics="bf16/4", deterministic=deterministic))
    with capture_logs() as logs:
        world.pair(prefill, decode)
    assert any(line["event"] == "link.not_deterministic" for line in logs) is is_logged


def test_a_hello_that_means_another_epoch_is_stale(make_world: MakeWorld) -> None:
    world = make_world()
    prefill, decode = world.node("p"), world.node("d")
    old = WorkerRef("d", Epoch(0, 5))
    prefill.owner.handle(messages.OrderLink(1, old, decode.owner.addresses))
    world.sleep(10.0)
    states = [state for state in prefill.to_loop if isinstance(state, messages.LinkState)]
    assert [(state.decode_worker, state.up) for state in states] == [(old, False)], "said once"
    assert "not known here" in states[0].reason


def test_a_restarted_prefill_takes_the_pair_over(make_world: MakeWorld) -> None:
    """The old process is stopped: its connection still stands when the new one dials."""
    world = make_world()
    old, decode = world.node("p", start_ns=1), world.node("d")
    world.pair(old, decode)
    world.open(old, decode, 1, num_blocks=2)
    world.settle()
    old.is_stopped = True
    new = world.node("p", start_ns=2)
    world.pair(new, decode)
    [retired] = decode.ends(1)
    assert isinstance(retired, messages.Retired)
    sent = world.hand_off(new, decode, 2, num_blocks=2)
    world.wait_ends(2, new, decode)
    assert_handed_off(new, decode, 2, sent)
    old.is_stopped = False
    world.sleep(5.0)
    first, *later = link_states(old, decode)
    assert first.up and not any(state.up for state in later), "it never comes back"
    assert link_states(new, decode)[-1].up and len(link_states(new, decode)) == 1


def test_a_prefill_that_has_changed_its_role_meanwhile_takes_the_pair_over(make_world: MakeWorld) -> None:
    """It counts its links from 1 again, and the decode worker has not noticed yet that the old ones are gone."""
    world = make_world()
    before, decode = world.node("p"), world.node("d")
    world.pair(before, decode)
    before.owner.handle(messages.CancelLink(1, decode.ref))
    world.sleep(6.0)
    world.order(before, decode)
    world.run(lambda: before.owner.metrics.links_opened == 2 and decode.owner.metrics.links_opened == 2)
    before.is_stopped = True
    after = world.node("p", link_facts=facts(role_generation=2), epoch=before.ref.epoch)
    world.pair(after, decode)
    sent = world.hand_off(after, decode, 1, num_blocks=2)
    world.wait_ends(1, after, decode)
    assert_handed_off(after, decode, 1, sent)


def test_an_earlier_epoch_is_refused_while_a_later_one_is_there(make_world: MakeWorld) -> None:
    world = make_world()
    new, decode, old = world.node("p", start_ns=2), world.node("d"), world.node("p", start_ns=1)
    world.pair(new, decode)
    assert "a later link of the pair is up" in _down_reason(world, old, decode)
    assert link_states(new, decode)[-1].up


def test_a_pair_comes_up_again_when_the_later_link_that_kept_it_down_has_ended(make_world: MakeWorld) -> None:
    """Whoever could say a generation above all that P will ever count must not keep the pair down for good."""
    world = make_world()
    prefill, decode = world.node("p"), world.node("d")
    forger = world.node("p", epoch=prefill.ref.epoch)
    forger.owner._generation = 1_000_000
    world.pair(prefill, decode)
    world.pair(forger, decode)
    world.run(lambda: not link_states(prefill, decode)[-1].up)
    world.sleep(5.0)
    assert not link_states(prefill, decode)[-1].up
    forger.owner.close()
    forger.is_gone = True
    world.run(lambda: link_states(prefill, decode)[-1].up)
    sent = world.hand_off(prefill, decode, 1, num_blocks=2)
    world.wait_ends(1, prefill, decode)
    assert_handed_off(prefill, decode, 1, sent)


def test_a_generation_that_a_stranger_claims_counts_for_nothing(make_world: MakeWorld) -> None:
    """It neither ends the link that is up nor keeps the next one out."""
    world = make_world()
    prefill, decode = (world.node(name, secret=b"s" * 32) for name in "pd")
    forger = world.node("p", epoch=prefill.ref.epoch, secret=b"t" * 32)
    forger.owner._generation = 1_000_000
    world.order(forger, decode)
    world.run(lambda: bool(link_states(forger, decode)))
    world.pair(prefill, decode)
    world.run(lambda: forger.owner._generation > 1_000_002)
    assert [state.up for state in link_states(prefill, decode)] == [True]
    assert not any(state.up for state in link_states(forger, decode))
    assert decode.owner.metrics.unproven.get("cluster.secret_file", 0) >= 2
    sent = world.hand_off(prefill, decode, 1, num_blocks=2)
    world.wait_ends(1, prefill, decode)
    assert_handed_off(prefill, decode, 1, sent)


def test_a_restarted_decode_is_another_pair(make_world: MakeWorld) -> None:
    world = make_world()
    prefill, old = world.node("p"), world.node("d", start_ns=1)
    world.pair(prefill, old)
    world.kill(old)
    world.run(lambda: not link_states(prefill, old)[-1].up, for_s=1.0)
    new = world.node("d", start_ns=2)
    world.pair(prefill, new)
    sent = world.hand_off(prefill, new, 1, num_blocks=2)
    world.wait_ends(1, prefill, new)
    assert_handed_off(prefill, new, 1, sent)


def test_orders_of_several_sessions_join(make_world: MakeWorld) -> None:
    world = make_world()
    prefill, decode = world.node("p"), world.node("d")
    world.pair(prefill, decode, session_id=1)
    world.order(prefill, decode, session_id=2)
    joined = link_states(prefill, decode)[-1]
    assert joined.up and joined.session_id == 2
    assert decode.owner.metrics.links_opened == 1
    prefill.owner.handle(messages.CancelLink(1, decode.ref))
    prefill.owner.handle(messages.CancelLink(1, decode.ref))
    world.sleep(2 * UNWANTED_S)
    assert prefill.owner.metrics.links_up == 1, "session 2 wants it still"
    prefill.owner.handle(messages.CancelAllLinks(2))
    world.sleep(UNWANTED_S - 1.0)
    assert prefill.owner.metrics.links_up == 1, "kept for a while"
    world.sleep(3.0)
    assert prefill.owner.metrics.links_up == decode.owner.metrics.links_up == 0
    assert not prefill.owner._links and not decode.owner._links


def test_an_unwanted_link_that_is_wanted_again_stays(make_world: MakeWorld) -> None:
    world = make_world()
    prefill, decode = world.node("p"), world.node("d")
    world.pair(prefill, decode)
    prefill.owner.handle(messages.CancelLink(1, decode.ref))
    world.sleep(UNWANTED_S - 1.0)
    world.order(prefill, decode, session_id=2)
    world.sleep(2 * UNWANTED_S)
    assert prefill.owner.metrics.links_up == 1 and decode.owner.metrics.links_opened == 1


def test_an_unwanted_link_serves_its_leases_to_the_end(make_world: MakeWorld) -> None:
    world = make_world()
    prefill, decode = world.node("p"), world.node("d")
    world.pair(prefill, decode)
    world.open(prefill, decode, 1, num_blocks=2)
    prefill.owner.handle(messages.CancelLink(1, decode.ref))
    world.sleep(3 * UNWANTED_S)
    sent = world.offer(prefill, 1, upto=2, num_new=2)
    prefill.owner.handle(messages.CommitLease(1, 1, None))
    world.wait_ends(1, prefill, decode)
    assert_handed_off(prefill, decode, 1, sent)
    world.sleep(3 * UNWANTED_S)
    assert prefill.owner.metrics.links_up == 0


def test_links_beyond_the_bound_of_prefill_are_full(make_world: MakeWorld) -> None:
    world = make_world()
    prefill = world.node("p", max_links=2)
    decodes = [world.node(f"d{index}") for index in range(3)]
    for decode in decodes[:2]:
        world.pair(prefill, decode)
    world.order(prefill, decodes[2], session_id=9)
    [state] = link_states(prefill, decodes[2])
    assert (state.up, state.reason, state.session_id) == (False, "full", 9)
    prefill.owner.handle(messages.CancelLink(1, decodes[0].ref))
    world.pair(prefill, decodes[2], session_id=9)
    world.settle()
    assert prefill.owner.metrics.links_up == 2


def test_links_beyond_the_bound_of_decode_are_full_until_there_is_room(make_world: MakeWorld) -> None:
    world = make_world()
    decode = world.node("d", max_links=1)
    one, two = world.node("p1"), world.node("p2")
    world.pair(one, decode)
    assert _down_reason(world, two, decode) == "full"
    world.kill(one)
    world.run(lambda: link_states(two, decode)[-1].up, for_s=5.0)


def test_a_wanted_link_is_dialled_until_decode_answers(make_world: MakeWorld) -> None:
    world = make_world()
    prefill, decode = world.node("p"), world.node("d")
    world.pair(prefill, decode)
    decode.is_stopped = True
    world.run(lambda: not link_states(prefill, decode)[-1].up, for_s=6.0)
    assert "silent" in link_states(prefill, decode)[-1].reason
    world.sleep(20.0)
    decode.is_stopped = False
    world.run(lambda: link_states(prefill, decode)[-1].up, for_s=6.0)
    generations = [state.generation for state in link_states(prefill, decode) if state.up]
    assert generations[0] < generations[-1]
    sent = world.hand_off(prefill, decode, 1, num_blocks=2)
    world.wait_ends(1, prefill, decode)
    assert_handed_off(prefill, decode, 1, sent)


def test_an_address_where_nobody_listens(make_world: MakeWorld) -> None:
    world = make_world()
    prefill, decode = world.node("p"), world.node("d")
    for addresses in (
        (),
        ("mem://nobody", "tcp://127.0.0.1:1", "unix:///nowhere/x.sock"),
        ("http://x", "tcp://x:y"),
    ):
        prefill.to_loop.clear()
        prefill.owner.handle(messages.CancelLink(1, decode.ref))
        world.sleep(2 * UNWANTED_S)
        prefill.owner.handle(messages.OrderLink(1, decode.ref, addresses))
        world.run(lambda: bool(link_states(prefill, decode)), for_s=10.0)
        assert not link_states(prefill, decode)[-1].up


def test_an_idle_link_lives_by_pings(make_world: MakeWorld) -> None:
    world = make_world()
    prefill, decode = world.node("p"), world.node("d")
    world.pair(prefill, decode)
    world.sleep(60.0)
    assert len(link_states(prefill, decode)) == 1
    assert prefill.owner.metrics.links_lost == decode.owner.metrics.links_lost == 0


def test_a_stopped_worker_finds_its_link_ended_and_answers_stale(make_world: MakeWorld) -> None:
    """P is stopped past link_s and continued: D has failed the lease, P learns it, nothing is handed off."""
    world = make_world()
    prefill, decode = world.node("p"), world.node("d")
    world.pair(prefill, decode)
    world.open(prefill, decode, 1, num_blocks=4)
    world.offer(prefill, 1, upto=2, num_new=2)
    world.run(lambda: bool(decode.events(messages.PullProgress)))
    prefill.is_stopped = True
    world.wait_ends(1, decode, for_s=6.0)
    assert isinstance(decode.ends(1)[0], messages.Retired)
    prefill.is_stopped = False
    world.offer(prefill, 1, upto=4, num_new=2)
    prefill.owner.handle(messages.CommitLease(1, 1, None))
    world.wait_ends(1, prefill, decode)
    [closed] = prefill.ends(1)
    assert isinstance(closed, messages.LeaseClosed) and closed.error is not None and closed.link_lost
    world.run(lambda: link_states(prefill, decode)[-1].up, for_s=6.0)


def test_close_ends_all_and_leaves_no_name_behind(make_world: MakeWorld) -> None:
    world = make_world()
    prefill, decode = world.node("p"), world.node("d")
    world.pair(prefill, decode)
    world.open(prefill, decode, 1, num_blocks=4)
    world.settle()
    decode.owner.close("drained")
    decode.owner.close("drained")
    decode.is_gone = True
    world.wait_ends(1, prefill, for_s=1.0)
    assert "drained" in link_states(prefill, decode)[-1].reason
    assert len(decode.ends(1)) == 1
