"""The index of a worker's prefix blocks follows events, and notices what it missed."""

from __future__ import annotations

from pdserve.block_messages import BlocksRemoved, BlocksStored, SnapshotPart
from router.prefix_index import IndexState, PrefixIndex

A, B, C = b"a" * 16, b"b" * 16, b"c" * 16


def following() -> PrefixIndex:
    index = PrefixIndex()
    assert not index.apply(SnapshotPart(1, (A,), True, False))
    assert not index.apply(SnapshotPart(2, (B,), False, True))
    return index


def test_a_snapshot_in_parts_and_changes_behind_it() -> None:
    index = following()
    assert index.num_hits([A, B, C]) == 2
    assert not index.apply(BlocksStored(3, (C,)))
    assert not index.apply(BlocksRemoved(4, (B,)))
    assert index.num_hits([A, B, C]) == 1 and index.num_hits([C]) == 1 and len(index) == 2


def test_only_leading_blocks_count() -> None:
    assert following().num_hits([C, A, B]) == 0


def test_a_gap_asks_once_for_a_snapshot_and_takes_nothing_in_until_it_comes() -> None:
    index = following()
    assert index.apply(BlocksStored(4, (C,)))
    assert not index.apply(BlocksStored(5, (C,)))
    assert index.state is IndexState.LOST and index.num_hits([A, B, C]) == 2 and index.num_gaps == 1
    assert not index.apply(SnapshotPart(6, (C,), True, True))
    assert index.num_hits([A]) == 0 and index.num_hits([C]) == 1
    assert not index.apply(BlocksStored(7, (A,)))
    assert index.num_hits([A]) == 1


def test_the_old_set_stands_until_the_new_one_is_complete() -> None:
    index = following()
    index.apply(SnapshotPart(3, (C,), True, False))
    assert index.num_hits([A]) == 1
    index.apply(SnapshotPart(4, (), False, True))
    assert index.num_hits([A]) == 0


def test_changes_before_the_first_snapshot_ask_for_one() -> None:
    assert PrefixIndex().apply(BlocksStored(1, (A,)))


def test_a_missing_part_asks_for_another_snapshot() -> None:
    index = PrefixIndex()
    index.apply(SnapshotPart(1, (A,), True, False))
    assert index.apply(SnapshotPart(3, (B,), False, True))
