"""The index of a worker's prefix blocks: what it was told, or before that what it was probably left with."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.block_messages import BlockEvents
from router.prefix_index import PrefixIndex

A, B, C, D = (bytes([n]) * 16 for n in range(4))


def events(*stored: bytes, removed: tuple[bytes, ...] = (), whole: bool = False) -> BlockEvents:
    return BlockEvents(whole=whole, stored=stored, removed=removed)


def told(num_blocks: int = 100) -> PrefixIndex:
    index = PrefixIndex(num_blocks)
    index.told(events(A, whole=True))
    index.told(events(B))
    return index


def test_the_whole_set_in_parts_and_changes_behind_it() -> None:
    index = told()
    assert index.num_hits([A, B, C]) == 2
    index.told(events(C, removed=(B,)))
    assert index.num_hits([A, B, C]) == 1 and index.num_hits([C]) == 1 and len(index) == 2
    index.told(events(D, whole=True))
    assert index.holds_exactly([D])


def test_only_leading_blocks_count() -> None:
    assert told().num_hits([C, A, B]) == 0


class _Looked(list[bytes]):
    """Hashes that count the looks at them."""

    num_looks = 0

    def __getitem__(self, place: Any) -> Any:
        self.num_looks += 1
        return super().__getitem__(place)


@pytest.mark.parametrize("num_held", [0, 1, 2, 255, 256, 499, 500])
def test_a_long_chain_takes_few_looks(num_held: int) -> None:
    chain = _Looked(number.to_bytes(2) for number in range(500))
    index = PrefixIndex(1_000)
    index.told(events(*list(chain)[:num_held], whole=True))
    assert index.num_hits(chain) == num_held
    assert chain.num_looks <= 11


def test_a_worker_that_tells_of_more_blocks_than_it_has_is_not_believed_without_end() -> None:
    index = told(num_blocks=3)
    index.told(events(C, D))
    assert index.holds_exactly([B, C, D])


def test_what_was_predicted_is_forgotten_when_the_worker_tells_itself() -> None:
    index = PrefixIndex(100)
    index.sent([A, B])
    assert index.num_hits([A, B]) == 2 and not index.is_told
    index.told(events(C, whole=True))
    assert index.holds_exactly([C]) and index.is_told


def test_a_prediction_forgets_what_was_used_least_lately_and_a_chain_from_its_end() -> None:
    predicted = PrefixIndex(6)
    chains = [[bytes([n, k]) for k in range(4)] for n in range(3)]
    predicted.sent(chains[0])
    predicted.sent(chains[1])
    assert [predicted.num_hits(chain) for chain in chains] == [2, 4, 0]
    predicted.sent(chains[0][:2])
    predicted.sent(chains[2][:2])
    assert [predicted.num_hits(chain) for chain in chains] == [2, 2, 2]
    predicted.sent([bytes([9, k]) for k in range(50)])
    assert len(predicted) == 6
