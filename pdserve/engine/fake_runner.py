"""A model without weights: its KV are real bytes in a real pool, and its text proves that they are the right ones.

For every position a record is written through the block table (`fake_rule`); to sample, all records of the sequence
are read back through its block table, and the token follows from them alone. The ids of the sequence are looked at
only to find which tokens are ruled out (bad words). No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import xxhash

from pdserve.engine import fake_rule
from pdserve.engine.layout import KvLayout
from pdserve.engine.port import ModelCard, Row, RowOutput, ScoreSpec, misfit, nothing_left
from pdserve.errors import RowFailed
from pdserve.kv_memory import HostMemory, KvMemory
from pdserve.sampling import TokenLogprobs

_MASKS = np.array(fake_rule.WORD_MASKS, dtype="<u8")
_GARBAGE = np.uint64(0xDEADBEEFDEADBEEF)


@dataclass(frozen=True, slots=True)
class FakeFaults:
    """What is to break, and where; empty in production.

    row_token_ids   computing one of these kills its row; step_token_ids: the whole step
    failing_steps   these calls of `run` raise, counted from 1
    sound           whether the engine may go on after a step that raised
    """

    row_token_ids: frozenset[int] = frozenset()
    step_token_ids: frozenset[int] = frozenset()
    failing_steps: frozenset[int] = frozenset()
    sound: bool = True


class FakeDevice(KvMemory, Protocol):
    """Memory that a fake engine computes in. bytes: all of it, as the engine sees it; the links may not."""

    @property
    def bytes(self) -> memoryview: ...


class InjectedFault(Exception):
    """A step that was told to fail."""


class FakeRunner:
    """The engine port over `fake_rule`. Engine owner's thread only, but for `pool`, as the port says."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int = 16,
        vocab_size: int = fake_rule.VOCAB_SIZE,
        window_tokens: int = 8192,
        rule: fake_rule.FakeRule | None = None,
        faults: FakeFaults | None = None,
        make_memory: Callable[[int], FakeDevice] = HostMemory,
    ) -> None:
        if vocab_size <= fake_rule.EOS_ID:
            raise ValueError(
                f"the fake model's vocabulary needs more than {fake_rule.EOS_ID} ids, got {vocab_size}"
            )
        self._rule = replace(rule or fake_rule.FakeRule(), vocab_size=vocab_size)
        self._faults = faults or FakeFaults()
        self._layout = KvLayout(
            num_blocks=num_blocks,
            kv_heads=2,
            layers=1,
            block_size=block_size,
            head_dim=1,
            dtype="uint64",
            item_bytes=8,
        )
        self._card = ModelCard(
            name="fake",
            vocab_size=vocab_size,
            window_tokens=window_tokens,
            weights_fingerprint="fake-1",
            numerics="fake",
            deterministic=True,
            cache_seed=b"pdserve fake model 1",
            step_errors_are_sound=self._faults.sound,
        )
        # [blocks, words of a record (head, k/v), slots]: the layout with its dims of size 1 left out.
        self._pool = make_memory(self._layout.pool_bytes)
        self._records = np.frombuffer(self._pool.bytes, dtype="<u8").reshape(
            num_blocks, fake_rule.RECORD_WORDS, block_size
        )
        self._num_runs = 0

    @property
    def card(self) -> ModelCard:
        return self._card

    @property
    def layout(self) -> KvLayout:
        return self._layout

    @property
    def pool(self) -> KvMemory:
        return self._pool

    def run(self, rows: Sequence[Row]) -> list[RowOutput]:
        """Write all records of all rows, then read back and sample. Raises InjectedFault where it was told to."""
        self._num_runs += 1
        errors = [self._error(row) for row in rows]
        self._break_step(rows, errors)
        for row, error in zip(rows, errors, strict=True):
            if error is None:
                self._write(row)
        outputs: list[RowOutput] = []
        for row, error in zip(rows, errors, strict=True):
            outputs.append(RowOutput(error=error) if error is not None else self._output(row))
        return outputs

    def _error(self, row: Row) -> RowFailed | None:
        """What is wrong with a row: an index that fits nowhere, or an injected fault."""
        error = misfit(row, self._card, self._layout)
        if error is not None:
            return error
        if self._faults.row_token_ids and not self._faults.row_token_ids.isdisjoint(row.token_ids):
            return RowFailed("injected row fault", start=row.start)
        return None

    def _break_step(self, rows: Sequence[Row], errors: Sequence[RowFailed | None]) -> None:
        """If the step is to fail, leave garbage where it would have written, and raise."""
        faults = self._faults
        poisoned = faults.step_token_ids and any(
            not faults.step_token_ids.isdisjoint(row.token_ids) for row in rows
        )
        if not poisoned and self._num_runs not in faults.failing_steps:
            return
        for row, error in zip(rows, errors, strict=True):
            if error is None:
                blocks, slots = self._places(row)
                self._records[blocks, :, slots] = _GARBAGE
        raise InjectedFault(f"run {self._num_runs} was told to fail")

    def _places(self, row: Row) -> tuple[np.ndarray, np.ndarray]:
        """Block id and slot of each position of the row's chunk."""
        positions = np.arange(row.start, row.start + len(row.token_ids))
        table = np.asarray(row.block_table, dtype=np.int64)
        return table[positions // self._layout.block_size], positions % self._layout.block_size

    def _write(self, row: Row) -> None:
        word = 0
        if row.start > 0:
            index, slot = divmod(row.start - 1, self._layout.block_size)
            word = int(self._records[row.block_table[index], 0, slot])
        if len(row.token_ids) == 1:  # a decode: as below, in a quarter of the time
            index, slot = divmod(row.start, self._layout.block_size)
            word = fake_rule.link(word, row.token_ids[0])
            self._records[row.block_table[index], :, slot] = _MASKS ^ np.uint64(word)
            return
        words: list[int] = []
        for token_id in row.token_ids:
            word = fake_rule.link(word, token_id)
            words.append(word)
        blocks, slots = self._places(row)
        self._records[blocks, :, slots] = np.array(words, dtype="<u8")[:, None] ^ _MASKS

    def _output(self, row: Row) -> RowOutput:
        scores = () if row.score is None else self._score(row, row.score)
        if row.sample is None:
            return RowOutput(scores=scores)
        spec, position = row.sample, row.start + len(row.token_ids)
        digest = xxhash.xxh3_64_intdigest(self._read(row, position).data)
        may = fake_rule.allowed_by(spec.key)
        if spec.mask is not None:
            may = fake_rule.both(may, spec.mask)
        token_id = self._rule.next_token(digest, spec.ids, spec.num_prompt_tokens, spec.key, may)
        if token_id is None:
            return RowOutput(error=nothing_left(spec, spec.position))
        top = spec.key.params.logprobs
        logprobs = None if top is None else self._rule.logprobs(digest, position, token_id, top)
        return RowOutput(token_id, logprobs, scores=scores)

    def _score(self, row: Row, score: ScoreSpec) -> tuple[TokenLogprobs, ...]:
        first = row.start + score.first
        records = self._read(row, first + len(score.next_ids))
        hasher = xxhash.xxh3_64(records[:first].data)
        scores: list[TokenLogprobs] = []
        for position, token_id in enumerate(score.next_ids, start=first):
            hasher.update(records[position].data)
            scores.append(self._rule.logprobs(hasher.intdigest(), position + 1, token_id, score.top))
        return tuple(scores)

    def _read(self, row: Row, num_positions: int) -> np.ndarray:
        """Records of the sequence's first positions, out of its blocks. [num_positions, RECORD_WORDS]"""
        table = row.block_table[: self._layout.blocks_for(num_positions)]
        records = self._records[table].transpose(0, 2, 1).reshape(-1, fake_rule.RECORD_WORDS)[:num_positions]
        return np.ascontiguousarray(records)
