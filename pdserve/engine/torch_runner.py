"""The runner that computes: a real model over the paged pool, in PyTorch on this machine's CPU."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from pdserve.engine.attention import BatchedAttention, Span, StepAttention, begun_blocks
from pdserve.engine.kv_pool import KvPool
from pdserve.engine.layout import KvLayout
from pdserve.engine.model_folder import ModelFolder
from pdserve.engine.models.decoder import StepInputs
from pdserve.engine.native.attention import NativeSteps, fits
from pdserve.engine.native.scan import NativeScan
from pdserve.engine.numerics import Precision, choose_precision, describe
from pdserve.engine.parallel.team import ALONE, Team
from pdserve.engine.port import ModelCard, Row, RowOutput, SampleSpec, sort_out
from pdserve.engine.prompt_scores import Scores, ScoreSlice, scores_of, slices_of, with_scores
from pdserve.engine.row_proof import PROVEN_ROWS, prove
from pdserve.engine.row_scan import TORCH_SCAN, RowScan
from pdserve.engine.row_tiles import ROW_COUNTS, RowTiles
from pdserve.engine.sampler import sample
from pdserve.engine.tiled_attention import TiledAttention
from pdserve.kv_memory import HostMemory, KvMemory
from pdserve.malloc import trim_heap
from pdserve.modelstore.errors import BadModel
from pdserve.modelstore.progress import ByteProgress
from pdserve.sampling import SampleKey, SamplingParams

_PROOF_TOKENS = 200


class TorchRunner:
    """Implements `Runner`. Built anywhere, then used from the engine owner's thread only (`pool` excepted)."""

    def __init__(
        self,
        model_dir: Path,
        *,
        dtype: str,
        deterministic: bool,
        num_threads: int,
        num_blocks: int | None,
        kv_memory_bytes: int,
        block_size: int,
        long_context: bool = False,
        precision: Precision | None = None,
        progress: ByteProgress | None = None,
        make_memory: Callable[[int], HostMemory] = HostMemory,
        team: Team = ALONE,
    ) -> None:
        """Load a model folder.

        dtype        "auto", "bfloat16" or "float32"
        num_threads  of torch, in this process; 0 = all cores
        num_blocks   of the pool; None = as many as kv_memory_bytes hold
        long_context  a model with longrope takes the frequencies and the window of long contexts
        precision    instead of the one that dtype means on this CPU
        progress     told of the stored bytes that have been read
        make_memory  makes the pool's memory of so many bytes
        team         the ranks among which the model is divided, this one of them: its pool is its part of theirs,
                     which they share (`KvPart`)
        Raises BadModel: the folder can't be served, or the pool would hold no block.
        """
        self._num_threads = num_threads or os.cpu_count() or 1
        torch.set_num_threads(self._num_threads)
        folder = ModelFolder.open(model_dir, long_context=long_context, progress=progress)
        tiles = RowTiles() if deterministic else None
        precision = precision or choose_precision(dtype)
        kernels = precision.kernels.for_model() if precision.kernels else None
        precision = replace(precision, tiles=tiles, kernels=kernels)
        with torch.inference_mode():
            self._model = folder.decoder(precision, team)
            if tiles is not None:
                prove(tiles, precision.compute)
        self._precision = precision
        self._heads = folder.heads(team.shard)
        layout = folder.layout(precision, block_size)
        if num_blocks is None:
            num_blocks = kv_memory_bytes // layout.block_bytes
        if num_blocks < 1:
            raise BadModel("the KV memory holds no block", want=layout.block_bytes, got=kv_memory_bytes)
        self._team = team
        self._shares_heads = team.shard.shares_heads(layout.kv_heads)
        #: of the pool that all ranks share
        self.whole_layout = replace(layout, num_blocks=num_blocks)
        self._layout = team.shard.kv_part(layout.kv_heads).layout(self.whole_layout)
        self._pool = KvPool(self._layout, precision.kv, make_memory)
        self._native: NativeSteps | None = None
        if precision.kernels is not None and fits(self._heads, self._pool):
            self._native = NativeSteps(precision.kernels, self._pool, self._heads)
        self._scan: RowScan = TORCH_SCAN if precision.kernels is None else NativeScan(precision.kernels)
        trim_heap()
        numerics = describe(precision, self._num_threads, is_quantised=folder.weights.is_quantised)
        self._card = folder.card(numerics, deterministic=deterministic)
        if tiles is not None:
            tiles.counts = _held_by_all(tiles, team)
            counts = "-".join(map(str, tiles.counts))
            proven = f"{self._card.numerics}/tiles{counts}/rows{PROVEN_ROWS}/bits{self._rehearse()}"
            self._card = replace(self._card, numerics=proven)

    def _rehearse(self) -> str:
        """A digest of the logits behind a fixed prompt: CPUs of one capability may still compute differently.

        The prompt is computed in one step, then cut and in company: all parts of the model together, attention too.
        Raises BadModel if that makes a difference.
        """
        size, num_blocks = self._layout.block_size, self.whole_layout.num_blocks
        part = self._team.shard.kv_part(self.whole_layout.kv_heads)
        num_own = min(num_blocks, -(-min(_PROOF_TOKENS, self._card.window_tokens) // size))
        length = min(_PROOF_TOKENS, self._card.window_tokens, num_own * size)
        key = SampleKey(params=SamplingParams(), seed=0, choice=0, eos_token_ids=(), max_tokens=1)
        ids = tuple(index * 7919 % self._card.vocab_size for index in range(length))

        def row(begin: int, end: int) -> Row:
            sample = SampleSpec(key, ids, length) if end == length else None
            return Row(ids[begin:end], begin, part.table(range(num_own)), sample)

        company = [Row(ids[:7], 0, part.table((num_own,)), None)] if num_own < num_blocks else []
        ends = sorted({max(1, length * 2 // 5), max(1, length - 2), max(1, length - 1), length})
        with torch.inference_mode():
            whole = self._model.logits(self._forward([row(0, length)], []))[0]
            for begin, end in zip([0, *ends[:-1]], ends, strict=True):
                cut = self._model.logits(self._forward([*company, row(begin, end)], []))
        if not torch.equal(cut[0], whole):
            raise BadModel(
                "this machine's kernels can't be made deterministic", function="the model as a whole"
            )
        return hashlib.blake2b(whole.contiguous().numpy().tobytes(), digest_size=8).hexdigest()

    @property
    def num_threads(self) -> int:
        return self._num_threads

    @property
    def card(self) -> ModelCard:
        return self._card

    @property
    def layout(self) -> KvLayout:
        return self._layout

    @property
    def pool(self) -> KvMemory:
        return self._pool.memory

    def run(self, rows: Sequence[Row]) -> list[RowOutput]:
        """See `Runner.run`. A row with an id or block out of range fails alone, before anything is computed."""
        outputs, sound = sort_out(rows, self._card, self._layout)
        if not sound:
            return outputs
        sound_rows = [rows[index] for index in sound]
        slices = slices_of(sound_rows)
        scores: Scores = {}
        if slices:
            logits, scores = self._logits_and_scores(sound_rows, slices)
        else:
            logits = self.logits(sound_rows)
        asked = [(index, spec) for index in sound if (spec := rows[index].sample) is not None]
        with torch.inference_mode():
            sampled = sample(logits, [spec for _, spec in asked], self._scan)
        for (index, _), output in zip(asked, sampled, strict=True):
            outputs[index] = output
        for place, given in scores.items():
            outputs[sound[place]] = with_scores(outputs[sound[place]], given)
        return outputs

    def follow(self, rows: Sequence[Row], after: Mapping[int, int]) -> None:
        """See `Follower.follow`: the same sums and logits, in the same order, as `run` at rank 0."""
        slices = slices_of(rows)
        num_sampled = sum(1 for row in rows if row.sample)
        with torch.inference_mode():
            hidden = self._forward(rows, slices)
            for part in torch.split(hidden, [num_sampled, *(len(each.positions) for each in slices)]):
                self._model.logits(part)

    def logits(self, rows: Sequence[Row]) -> Tensor:
        """One forward pass over sound rows; what `run` samples from.

        returns  [rows that sample, vocabulary] float32, in the order of `rows`
        """
        with torch.inference_mode():
            return self._model.logits(self._forward(rows, []))

    def _logits_and_scores(self, rows: Sequence[Row], slices: Sequence[ScoreSlice]) -> tuple[Tensor, Scores]:
        num_sampled = sum(1 for row in rows if row.sample)
        with torch.inference_mode():
            hidden = self._forward(rows, slices)
            logits = self._model.logits(hidden[:num_sampled])
            return logits, scores_of(slices, hidden[num_sampled:], self._model.logits)

    def _forward(self, rows: Sequence[Row], scored: Sequence[ScoreSlice]) -> Tensor:
        """Compute all rows.

        scored   whose hidden states are wanted besides the last ones
        returns  [tokens, hidden]: of the last tokens of rows that sample, then of each of `scored`
        """
        torch.set_num_threads(self._num_threads)  # OpenMP keeps it per thread; another one may have built us
        # Single tokens first, by length: attention groups neighbours. The sort is stable: equal steps, equal batches.
        order = sorted(range(len(rows)), key=lambda index: _order(rows[index]))
        spans: dict[int, Span] = {}
        token_ids: list[int] = []
        for index in order:
            row = rows[index]
            spans[index] = Span(len(token_ids), len(row.token_ids), row.start, row.block_table)
            token_ids.extend(row.token_ids)
        in_order = list(spans.values())
        begun = begun_blocks(in_order, self._layout.block_size)
        self._pool.begin_blocks(begun)
        if begun and self._shares_heads:
            self._team.meet()  # or it would zero what another rank has written
        positions = [position for span in in_order for position in range(span.start, span.end)]
        last = [spans[index].first + spans[index].length - 1 for index, row in enumerate(rows) if row.sample]
        wanted = last + [spans[each.place].first + place for each in scored for place in each.positions]
        padding = [0] * (self._precision.padded(len(token_ids)) - len(token_ids))
        with torch.inference_mode():
            step = StepInputs(
                torch.tensor(token_ids + padding),
                torch.tensor(positions + padding),
                torch.tensor(wanted, dtype=torch.int64),
                self._attention(in_order, len(token_ids) + len(padding)),
            )
            return self._model.forward(step)

    def _attention(self, spans: list[Span], num_rows: int) -> StepAttention:
        if self._native is not None:
            return self._native.of(spans)
        if self._card.deterministic:
            return TiledAttention(self._pool, spans, self._heads, num_rows)
        return BatchedAttention(self._pool, spans, self._heads, self._precision.compute, num_rows)


def _held_by_all(tiles: RowTiles, team: Team) -> tuple[int, ...]:
    """Numbers of rows that every rank has proven: all of them compute steps of one shape."""
    return tuple(count for count in ROW_COUNTS if team.most(float(count not in tiles.counts)) == 0)


def _order(row: Row) -> tuple[bool, int]:
    return len(row.token_ids) > 1, row.start
