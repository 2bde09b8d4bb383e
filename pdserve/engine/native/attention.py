"""Attention of one step by compiled kernels: K and V are read in the pool's blocks, nothing is gathered or copied.

A step is cut into tasks that any thread may take a KV head of: some tokens of one sequence. A single token's context is
cut too, into the kernel's spans, whose results are merged in order (kernels/attention.c). No cut changes a result, so
this is also deterministic mode's attention.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pdserve.engine.attention import Heads, Span, Turn
from pdserve.engine.kv_pool import KvPool
from pdserve.engine.native.library import Kernels

_SPAN_KEYS = 256  # SPAN, MAX_ROWS and MAX_DIM of the kernel
_MAX_ROWS = 128
_MAX_DIM = 256
# Of a chunk's task: packing keys and values costs as much as a few rows do.
_TASK_ROWS = 96
_POSITION, _END = 2, 5  # of a task's numbers: its first token's position, and where the keys that it sees end


class _Step(ctypes.Structure):
    """`Step` of the kernel."""

    _fields_ = [
        ("pool", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
        ("partials", ctypes.c_void_p),
        ("queries", ctypes.c_void_p),
        ("num_tokens", ctypes.c_int64),
        ("layers", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    ]


def fits(heads: Heads, pool: KvPool) -> bool:
    """Whether the kernel has these sizes."""
    size = heads.head_dim
    return (
        pool.dtype is torch.bfloat16 and size % 16 == 0 and size <= _MAX_DIM and heads.group_size <= _MAX_ROWS
    )


class NativeSteps:
    """Makes the attention of steps. Sizes must fit. Engine owner only."""

    def __init__(self, kernels: Kernels, pool: KvPool, heads: Heads) -> None:
        self._kernels = kernels
        self._pool = pool
        self._heads = heads
        self._last: NativeAttention | None = None

    def of(self, spans: Sequence[Span]) -> NativeAttention:
        """Of one step. What was made for the step before can't be used any longer."""
        if self._last is None or not self._last.advance(spans):
            self._last = NativeAttention(self._kernels, self._pool, spans, self._heads)
        return self._last


class NativeAttention:
    """See `StepAttention`. Sizes must fit."""

    def __init__(self, kernels: Kernels, pool: KvPool, spans: Sequence[Span], heads: Heads) -> None:
        """What layers share is made here."""
        layout = pool.layout
        size = layout.block_size
        self._call = kernels.functions.pd_attend
        self._heads = heads
        self._spans = spans
        self._kv_pool = pool
        # Room for the blocks of a row's last span: until another one begins, its table lies where it is.
        self._tables_at = [0, *accumulate(-(-span.end // _SPAN_KEYS) * _per_span(size) for span in spans)]
        self._plans = {window: _Plan(spans, self._tables_at, heads, window) for window in heads.kinds}
        windows = map(heads.window, range(layout.layers))
        self._views = _numbers([self._plans[window].view for window in windows], np.int64)
        #: [layers] `View` of the kernel
        self.views_at = self._views.data_ptr()
        tables = np.zeros(self._tables_at[-1], np.int32)
        for span, begin in zip(spans, self._tables_at, strict=False):
            blocks = span.blocks(size)
            pool.prepare(blocks)
            tables[begin : begin + len(blocks)] = blocks
        self._tables = torch.from_numpy(tables)
        self._slots = _numbers(
            [
                span.block_table[position // size] * size + position % size
                for span in spans
                for position in range(span.start, span.end)
            ],
            np.int64,
        )
        num_tokens = len(self._slots)
        self._queries = torch.empty(num_tokens, heads.query_width, dtype=kernels.activations)
        self._outputs = torch.empty(num_tokens, heads.query_width, dtype=kernels.activations)
        num_partials = max(plan.num_partials for plan in self._plans.values())
        self._partials = torch.empty(
            num_partials * heads.num_kv_heads * heads.group_size * (heads.head_dim + 2)
        )
        self._pool = pool.tensor
        self._step = _Step(
            pool.tensor.data_ptr(),
            self._slots.data_ptr(),
            self._tables.data_ptr(),
            self._partials.data_ptr(),
            self._queries.data_ptr(),
            num_tokens,
            layout.layers,
            layout.kv_heads,
            heads.group_size,
            heads.head_dim,
            size,
            heads.scale,
            heads.softcap,
        )
        #: `Step` of the kernel
        self.step_at = ctypes.addressof(self._step)

    def advance(self, spans: Sequence[Span]) -> bool:
        """Become the attention of the step that follows. False, and nothing has changed: it is another kind of step.

        It follows if all are the single tokens behind those of before, in tables that are the same lists (which only
        grow), and none begins another span.
        """
        if len(spans) != len(self._spans) or self._heads.kinds != [0]:
            return False
        for span, before in zip(spans, self._spans, strict=True):
            if (
                span.block_table is not before.block_table
                or span.length != 1
                or before.length != 1
                or span.start != before.start + 1
                or span.start % _SPAN_KEYS == 0
            ):
                return False
        self._spans = spans
        self._plans[0].advance()
        self._slots.add_(1)
        size = self._kv_pool.layout.block_size
        for row, span in enumerate(spans):
            if span.start % size == 0:
                index = span.start // size
                block_id = span.block_table[index]
                self._kv_pool.prepare((block_id,))
                self._tables[self._tables_at[row] + index] = block_id
                self._slots[row] = block_id * size
        return True

    def attend(self, layer: int, projected: Tensor, turn: Turn) -> Tensor:
        """In the kernels' activations; the projection is left as it is."""
        norm = turn.norm
        assert projected.dtype is self._outputs.dtype and projected.is_contiguous()
        self._call(
            self.step_at,
            self.views_at + layer * self._views.stride(0) * self._views.itemsize,
            layer,
            projected.data_ptr(),
            turn.turns.data_ptr(),
            None if norm is None else norm.weight.data_ptr(),
            0.0 if norm is None else norm.eps,
            self._outputs.data_ptr(),
            torch.get_num_threads(),
        )
        return self._outputs


class _Plan:
    """The tasks of all layers with one window: the largest first, so that no thread ends long after the others."""

    def __init__(self, spans: Sequence[Span], tables: Sequence[int], heads: Heads, window: int) -> None:
        """tables: where in the step's table each row's begins."""
        tasks: list[tuple[int, ...]] = []
        merges: list[tuple[int, ...]] = []
        num_tokens = max(1, _TASK_ROWS // heads.group_size)
        self.num_partials = 0
        for span, table in zip(spans, tables, strict=False):
            for offset in range(0, span.length, num_tokens):
                count, position = min(num_tokens, span.length - offset), span.start + offset
                first_key, end = max(0, position + 1 - window) if window else 0, position + count
                row = span.first + offset
                cuts = [
                    first_key,
                    *range((first_key // _SPAN_KEYS + 1) * _SPAN_KEYS, end, _SPAN_KEYS),
                    end,
                ]
                is_cut = span.length == 1 and len(cuts) > 2
                if not is_cut:
                    tasks.append((row, count, position, table, first_key, end, -1))
                    continue
                merges.append((row, self.num_partials, len(cuts) - 1))
                for begin, stop in pairwise(cuts):
                    tasks.append((row, 1, position, table, begin, stop, self.num_partials))
                    self.num_partials += 1
        tasks.sort(key=_work, reverse=True)
        self._tasks = _numbers(tasks, np.int64)
        self._merges = _numbers(merges, np.int64)
        # What a step further adds: to each position, and to the last key of the spans that end there.
        self._further = torch.zeros_like(self._tasks)
        self._further[:, _POSITION] = 1
        self._further[:, _END] = self._tasks[:, _END] == self._tasks[:, _POSITION] + 1
        #: the numbers of a `View` of the kernel
        self.view = (window, self._tasks.data_ptr(), len(tasks), self._merges.data_ptr(), len(merges))

    def advance(self) -> None:
        """Single tokens only: each one position further."""
        self._tasks.add_(self._further)


def _per_span(block_size: int) -> int:
    """Blocks that hold the keys of a span, wherever it begins."""
    return -(-_SPAN_KEYS // block_size)


def _work(task: tuple[int, ...]) -> int:
    """Rows times keys."""
    return task[1] * (task[5] - task[4])


def _numbers(values: Sequence[int] | Sequence[tuple[int, ...]], kind: type[np.integer[Any]]) -> Tensor:
    """numpy reads nested lists several times faster than torch."""
    return torch.from_numpy(np.array(values, dtype=kind))
