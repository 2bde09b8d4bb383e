"""Pieces, lease table, early frames, wanted links: each alone."""

from __future__ import annotations

import random

import pytest

from kv_transfer.early_frames import EarlyFrames
from kv_transfer.frames import Bye, Commit, Kind, Ready, Withdraw
from kv_transfer.framing import HEADER_BYTES, encode, parse_body, parse_header
from kv_transfer.lease import SendLease
from kv_transfer.lease_table import LeaseTable
from kv_transfer.pieces import BlockPieces
from kv_transfer.wanted_links import MAX_BACKOFF_S, UNWANTED_S, WantedLinks
from pdserve.errors import (
    Failure,
    Incompatible,
    InvariantViolated,
    Overloaded,
    Stale,
    WorkerLost,
)
from pdserve.ids import Epoch, WorkerRef


@pytest.mark.parametrize(
    ("block_bytes", "piece_bytes"), [(10, 3), (9, 3), (3, 9), (1, 1), (4 << 20, 4 << 20), (5 << 20, 4 << 20)]
)
def test_pieces_cover_each_block_exactly(block_bytes: int, piece_bytes: int) -> None:
    pieces = BlockPieces(block_bytes, piece_bytes)
    spans = [pieces.span(piece) for piece in range(2 * pieces.pieces_per_block)]
    for block in (0, 1):
        position = 0
        for offset, num_bytes in ((offset, size) for owner, offset, size in spans if owner == block):
            assert offset == position and 0 < num_bytes <= pieces.largest
            position += num_bytes
        assert position == block_bytes


@pytest.mark.parametrize(("block_bytes", "piece_bytes"), [(0, 1), (1, 0), (1, (4 << 20) + 1)])
def test_impossible_cuts_are_refused(block_bytes: int, piece_bytes: int) -> None:
    with pytest.raises(ValueError, match="piece_bytes"):
        BlockPieces(block_bytes, piece_bytes)


def _lease(lease_id: int) -> SendLease:
    return SendLease(lease_id=lease_id, num_blocks=1, num_skip=0, progress_s=0.0)


def test_an_ended_lease_never_lives_again() -> None:
    table: LeaseTable[SendLease] = LeaseTable()
    table.open(_lease(1))
    with pytest.raises(InvariantViolated):
        table.open(_lease(1))
    table.end(1)
    assert table.has_ended(1) and 1 not in table and table.get(1) is None
    with pytest.raises(Stale):
        table.live(1)


def test_the_memory_of_ended_leases_is_bounded() -> None:
    table: LeaseTable[SendLease] = LeaseTable()
    for lease_id in range(5000):
        table.open(_lease(lease_id))
        table.end(lease_id)
    assert not table.has_ended(0) and table.has_ended(4999) and len(table) == 0


def test_early_frames_are_kept_in_order_for_a_moment() -> None:
    early = EarlyFrames(hold_s=1.0)
    frames: list[Ready | Commit | Withdraw] = [Ready(5, 1), Commit(5, 1, 9, None)]
    for frame in frames:
        early.keep(frame, 10.0)
    early.keep(Ready(6, 1), 10.5)
    early.keep(Withdraw.of(7, Failure("Draining", "")), 10.5)
    assert early.next_due_s() == 11.0
    assert early.take(5) == frames and early.take(5) == []
    assert early.expired(11.4) == []
    assert early.expired(11.5) == [(6, Kind.READY)], "who withdrew needs no answer"
    assert early.next_due_s() is None


def test_early_frames_are_bounded() -> None:
    early = EarlyFrames(hold_s=1.0)
    for lease_id in range(1000):
        early.keep(Ready(lease_id, 1), 0.0)
    for upto in range(1000):
        early.keep(Ready(999, upto), 0.0)
    assert early.take(0) == [] and len(early.take(999)) == 64 and len(early.expired(1.0)) == 255


def test_a_long_reason_is_cut_to_what_the_reader_takes() -> None:
    long = Failure("E" * 999, "m" * 9999, {f"{n:02}" + "x" * 999: "v" * 9999 for n in range(40)})
    wire = encode(Bye.of(long), 1)
    assert parse_body(parse_header(wire[:HEADER_BYTES]), wire[HEADER_BYTES:]) == Bye.of(long)
    assert len(Bye.of(long).fields) == 16


D = [WorkerRef(f"d{index}", Epoch(1, index)) for index in range(3)]


def _orders(max_links: int = 2) -> WantedLinks:
    return WantedLinks(max_links=max_links, random=random.Random(1))


def test_orders_are_counted_per_session() -> None:
    orders = _orders()
    order = orders.order(1, D[0], ("a",), 0.0)
    assert orders.order(2, D[0], ("a",), 0.0) is order
    assert orders.due(0.0) == [order] and orders.due(0.0) == []
    orders.cancel(1, D[0], 1.0)
    orders.cancel(3, D[0], 1.0)
    assert orders.next_due_s() is None
    orders.cancel_all(2, 1.0)
    assert orders.next_due_s() == 1.0 + UNWANTED_S
    assert orders.due(1.0 + UNWANTED_S) == [] and orders.get(D[0]) is None


def test_orders_beyond_the_bound_are_refused_and_unwanted_ones_give_way() -> None:
    orders = _orders()
    for decode_worker in D[:2]:
        orders.order(1, decode_worker, (), 0.0)
    assert orders.spare() is None
    with pytest.raises(Overloaded, match="full"):
        orders.order(1, D[2], (), 0.0)
    orders.cancel(1, D[0], 0.0)
    spare = orders.spare()
    assert spare is not None and spare.decode_worker == D[0]
    orders.forget(spare)
    orders.order(1, D[2], (), 0.0)


def test_redial_backs_off_and_a_final_end_is_final() -> None:
    orders = _orders()
    order = orders.order(1, D[0], (), 0.0)
    now_s, waits = 0.0, []
    for _ in range(12):
        assert orders.due(now_s) == [order]
        orders.went_down(order, WorkerLost("refused"), now_s)
        assert order.due_s is not None
        waits.append(order.due_s - now_s)
        now_s = order.due_s
    assert (
        waits[0] <= 0.05 and all(wait <= MAX_BACKOFF_S for wait in waits) and waits[-1] >= MAX_BACKOFF_S / 2
    )
    orders.went_down(order, Incompatible("no"), now_s)
    assert orders.due(now_s + 100.0) == []
