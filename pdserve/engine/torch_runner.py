"""The runner that computes: a real model over the paged pool, in PyTorch on this machine's CPU."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from pdserve.engine.attention import BatchedAttention, Heads, Span, StepAttention
from pdserve.engine.kv_pool import KvPool
from pdserve.engine.layout import KvLayout
from pdserve.engine.model_config import BadModel, load_config, read_json
from pdserve.engine.models import MODELS
from pdserve.engine.models.decoder import StepInputs
from pdserve.engine.numerics import choose_precision, describe, safe_row_padding
from pdserve.engine.port import ModelCard, Row, RowOutput
from pdserve.engine.sampler import sample
from pdserve.engine.tiled_attention import TiledAttention
from pdserve.engine.weights import Weights
from pdserve.errors import RowFailed


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
    ) -> None:
        """Load a model folder.

        dtype        "auto", "bfloat16" or "float32"
        num_threads  of torch, in this process; 0 = all cores
        num_blocks   of the pool; None = as many as kv_memory_bytes hold
        Raises BadModel: the folder can't be served, or the pool would hold no block.
        """
        self._num_threads = num_threads or os.cpu_count() or 1
        self._thread_of_torch: int | None = None
        self._use_threads()
        config = load_config(model_dir, MODELS)
        precision = choose_precision(dtype)
        weights = Weights(model_dir, config)
        with torch.inference_mode():
            self._model = MODELS[config.architecture](config, weights, precision)
            self._row_padding = self._safe_padding(precision.compute) if deterministic else 1
        self._precision = precision
        self._heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim)
        self._layout = _layout(
            config.num_kv_heads, config.num_layers, config.head_dim, precision.kv, block_size
        )
        if num_blocks is None:
            num_blocks = kv_memory_bytes // self._layout.block_bytes
        if num_blocks < 1:
            raise BadModel("the KV memory holds no block", want=self._layout.block_bytes, got=kv_memory_bytes)
        self._layout = _layout(
            config.num_kv_heads, config.num_layers, config.head_dim, precision.kv, block_size, num_blocks
        )
        self._pool = KvPool(self._layout, precision.kv)
        fingerprint = weights.fingerprint(read_json(model_dir / "config.json"))
        self._card = ModelCard(
            name=model_dir.name,
            vocab_size=config.vocab_size,
            window_tokens=config.max_positions,
            eos_token_ids=config.eos_token_ids,
            weights_fingerprint=fingerprint,
            numerics=describe(precision, self._num_threads, deterministic, self._row_padding),
            deterministic=deterministic,
            cache_seed=bytes.fromhex(fingerprint),
        )

    @property
    def card(self) -> ModelCard:
        return self._card

    @property
    def layout(self) -> KvLayout:
        return self._layout

    @property
    def pool(self) -> memoryview:
        return self._pool.memory

    def run(self, rows: Sequence[Row]) -> list[RowOutput]:
        """See `Runner.run`. A row with an id or block out of range fails alone, before anything is computed."""
        self._use_threads()
        errors = [self._check(row) for row in rows]
        outputs = [RowOutput(error=error) for error in errors]
        runnable = [index for index, error in enumerate(errors) if error is None]
        if runnable:
            with torch.inference_mode():
                for index, output in zip(
                    runnable, self._run([rows[index] for index in runnable]), strict=True
                ):
                    outputs[index] = output
        return outputs

    def _run(self, rows: list[Row]) -> list[RowOutput]:
        # Single tokens first, by length: attention groups neighbours (a stable sort: equal steps, equal batches).
        order = sorted(range(len(rows)), key=lambda index: _order(rows[index]))
        spans: list[Span] = []
        token_ids: list[int] = []
        for index in order:
            row = rows[index]
            spans.append(Span(len(token_ids), len(row.token_ids), row.start, row.block_table))
            token_ids.extend(row.token_ids)
        self._begin_blocks(spans)
        positions = [position for span in spans for position in range(span.start, span.end)]
        sampled = [place for place, index in enumerate(order) if rows[index].sample is not None]
        logit_rows = [spans[place].first + spans[place].length - 1 for place in sampled]
        outputs = [RowOutput()] * len(rows)
        logits = self._model.forward(
            StepInputs(
                torch.tensor(self._padded(token_ids)),
                torch.tensor(self._padded(positions)),
                torch.tensor(self._padded(logit_rows), dtype=torch.int64),
                self._attention(spans),
            )
        )
        specs = [spec for place in sampled if (spec := rows[order[place]].sample) is not None]
        for place, output in zip(sampled, sample(logits[: len(specs)], specs), strict=True):
            outputs[order[place]] = output
        return outputs

    def _attention(self, spans: list[Span]) -> StepAttention:
        form = TiledAttention if self._card.deterministic else BatchedAttention
        return form(self._pool, spans, self._heads, self._precision.compute)

    def _padded(self, values: list[int]) -> list[int]:
        """Repeat zeros up to a row number that keeps every row's bits (deterministic mode; else nothing)."""
        return values + [0] * (-len(values) % self._row_padding)

    def _begin_blocks(self, spans: list[Span]) -> None:
        """Zero each block that a row begins here and leaves partly unfilled."""
        size = self._layout.block_size
        self._pool.begin_blocks(
            [
                span.block_table[span.end // size]
                for span in spans
                if span.end % size and span.end // size * size >= span.start
            ]
        )

    def _check(self, row: Row) -> RowFailed | None:
        if not row.token_ids:
            return RowFailed("a row without tokens")
        if min(row.token_ids) < 0 or max(row.token_ids) >= self._card.vocab_size:
            return RowFailed("a token id outside the vocabulary", vocab_size=self._card.vocab_size)
        need = self._layout.blocks_for(row.start + len(row.token_ids))
        if row.start < 0 or len(row.block_table) < need:
            return RowFailed("a block table too short for its positions", want=need, got=len(row.block_table))
        table = row.block_table[:need]
        if min(table) < 0 or max(table) >= self._layout.num_blocks:
            return RowFailed("a block id outside the pool", num_blocks=self._layout.num_blocks)
        return None

    def _safe_padding(self, dtype: torch.dtype) -> int:
        linears = self._model.linears()
        return safe_row_padding(
            {name: linear for name, (linear, _) in linears.items()},
            {name: width for name, (_, width) in linears.items()},
            dtype,
        )

    def _use_threads(self) -> None:
        # OpenMP keeps the number per thread: set it once in each thread that computes.
        thread = threading.get_ident()
        if self._thread_of_torch != thread:
            torch.set_num_threads(self._num_threads)
            self._thread_of_torch = thread


def _order(row: Row) -> tuple[bool, int]:
    return len(row.token_ids) > 1, row.start


def _layout(
    kv_heads: int, layers: int, head_dim: int, dtype: torch.dtype, block_size: int, num_blocks: int = 0
) -> KvLayout:
    return KvLayout(
        num_blocks=num_blocks,
        kv_heads=kv_heads,
        layers=layers,
        block_size=block_size,
        head_dim=head_dim,
        dtype=str(dtype).removeprefix("torch."),
        item_bytes=dtype.itemsize,
    )
