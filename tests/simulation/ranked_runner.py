"""The fake engine as several ranks: of each record, every rank writes and reads the words of its heads alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from pdserve.engine import fake_rule
from pdserve.engine.fake_runner import FakeRunner
from pdserve.engine.parallel.shard import Shard
from pdserve.engine.port import Row

_NUM_HEADS = 2
_HEAD_WORDS = fake_rule.RECORD_WORDS // _NUM_HEADS


class RankedFakeRunner(FakeRunner):
    """As `FakeRunner`, whose texts and bytes it gives; ranks see one pool, each as its own smaller blocks."""

    def __init__(self, size: int, **rest: Any) -> None:
        super().__init__(**rest)
        self._parts = [Shard(rank, size).kv_part(_NUM_HEADS) for rank in range(size)]
        self._views: list[np.ndarray] = []
        self._masks: list[np.ndarray] = []
        for part in self._parts:
            own = part.layout(self._layout)
            heads = part.range(_NUM_HEADS)
            words = slice(heads.start * _HEAD_WORDS, heads.stop * _HEAD_WORDS)
            self._views.append(
                np.frombuffer(self._pool.bytes, dtype="<u8").reshape(
                    own.num_blocks, own.kv_heads * _HEAD_WORDS, own.block_size
                )
            )
            self._masks.append(np.array(fake_rule.WORD_MASKS[words], dtype="<u8"))

    def _write(self, row: Row) -> None:
        size = self._layout.block_size
        word = 0
        if row.start > 0:
            index, slot = divmod(row.start - 1, size)
            word = int(self._views[0][self._parts[0].table(row.block_table[index : index + 1])[0], 0, slot])
        words: list[int] = []
        for token_id in row.token_ids:
            word = fake_rule.link(word, token_id)
            words.append(word)
        written = np.array(words, dtype="<u8")[:, None]
        positions = np.arange(row.start, row.start + len(words))
        for part, view, masks in zip(self._parts, self._views, self._masks, strict=True):
            table = np.asarray(part.table(row.block_table), dtype=np.int64)
            view[table[positions // size], :, positions % size] = written ^ masks

    def _read(self, row: Row, num_positions: int) -> np.ndarray:
        table = row.block_table[: self._layout.blocks_for(num_positions)]
        by_part: dict[int, np.ndarray] = {}
        for part, view in zip(self._parts, self._views, strict=True):
            own = view[part.table(table)].transpose(0, 2, 1)
            by_part[part.index] = own.reshape(-1, view.shape[1])[:num_positions]
        return np.ascontiguousarray(np.concatenate([by_part[index] for index in sorted(by_part)], axis=1))
