"""A step as rank 0 tells it to the others: what is computed where, not what is sampled."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pdserve.engine.port import Row, SampleSpec, ScoreSpec
from pdserve.sampling import SampleKey, SamplingParams

# Of a row that samples: followers compute what it samples from, and rank 0 samples.
_ANY = SampleSpec(
    SampleKey(params=SamplingParams(), seed=0, choice=0, eos_token_ids=(), max_tokens=1), (0,), 1
)


class _RowOrder(msgspec.Struct, array_like=True, frozen=True):
    """block_ids: of the blocks that the step needs; scored: what `ScoreSpec` has, without what is named beside."""

    token_ids: list[int]
    start: int
    block_ids: list[int]
    samples: bool
    scored: tuple[int, list[int]] | None


_decoder = msgspec.msgpack.Decoder(list[_RowOrder])


def encode_step(rows: Sequence[Row], block_size: int) -> bytes:
    """Rows that fit (`misfit`)."""
    return msgspec.msgpack.encode([_order(row, block_size) for row in rows])


def decode_step(data: bytes) -> list[Row]:
    """For a follower to compute."""
    return [
        Row(
            order.token_ids,
            order.start,
            order.block_ids,
            _ANY if order.samples else None,
            None if order.scored is None else ScoreSpec(order.scored[1], order.scored[0], 0),
        )
        for order in _decoder.decode(data)
    ]


def _order(row: Row, block_size: int) -> _RowOrder:
    need = -(-(row.start + len(row.token_ids)) // block_size)
    scored = None if row.score is None else (row.score.first, list(row.score.next_ids))
    return _RowOrder(
        list(row.token_ids), row.start, list(row.block_table[:need]), row.sample is not None, scored
    )
