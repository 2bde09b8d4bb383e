"""All layers of a decoder as one table of operations, which one call computes for any number of tokens (program.c).

Its threads stay together from one operation to the next, and nothing returns to the interpreter in between. Operations
are the kernels that layers call one by one where this isn't possible, so results are the same bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pdserve.engine.native.attention import NativeAttention
from pdserve.engine.native.library import Kernels
from pdserve.engine.native.linear import NativeLinear
from pdserve.engine.native.packed import PackedLinear
from pdserve.engine.native.rows import NativeGate, NativeNorm

_LINEAR, _PACKED_LINEAR, _NORM, _GATE, _ATTEND = range(5)  # of program.c
_ALIGNMENT = 64  # bytes
_NOTHING = -1


class NotCompiled(Exception):
    """A part of the model isn't a compiled kernel."""


class Slot(NamedTuple):
    """Where the rows of some activations lie in a step's room, one slot behind the other.

    at     bytes of each row that lie before it
    width  of a row
    """

    at: int
    width: int


class _Operation(ctypes.Structure):
    """`Operation` of program.c."""

    _fields_ = [
        ("kind", ctypes.c_int64),
        ("source", ctypes.c_int64),
        ("target", ctypes.c_int64),
        ("more", ctypes.c_int64),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("outputs", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("number", ctypes.c_int64),
        ("turns", ctypes.c_int64),
        ("eps", ctypes.c_float),
    ]


class Program:
    """Built once for a model, whose parts outlive it, then run for each step by the engine owner.

    What adds an operation raises NotCompiled if its part isn't computed by a kernel. A target is named: what is written
    there is gone when the next operation writes to the same name.
    """

    def __init__(self, kernels: Kernels, width: int) -> None:
        """width: of the residual stream, which is the first slot."""
        self._call = kernels.functions.pd_run
        self._activations = kernels.activations
        self._slots: dict[tuple[str, int], Slot] = {}
        self._row_bytes = 0
        self._operations: list[_Operation] = []
        self._table = (_Operation * 0)()
        self.stream = self._slot("stream", width)

    def product(self, linear: object, source: Slot, target: str) -> Slot:
        if isinstance(linear, NativeLinear):
            kind, more, weight, number = _LINEAR, _NOTHING, linear.weight_at, 0
        elif isinstance(linear, PackedLinear):
            more = self._slot("bytes", linear.room_bytes // self._activations.itemsize).at
            kind, weight, number = _PACKED_LINEAR, linear.segments_at, linear.num_segments
        else:
            raise NotCompiled
        assert linear.width == source.width
        to = self._slot(target, linear.outputs)
        self._add(
            _Operation(
                kind, source.at, to.at, more, weight, linear.bias_at, to.width, source.width, number, 0, 0.0
            )
        )
        return to

    def norm(self, norm: object, source: Slot, target: str, more: Slot | None = None) -> Slot:
        """more: what is added to the source first, for good."""
        if not isinstance(norm, NativeNorm):
            raise NotCompiled
        to = self._slot(target, source.width)
        added = _NOTHING if more is None else more.at
        self._add(
            _Operation(_NORM, source.at, to.at, added, norm.weight_at, None, 0, source.width, 0, 0, norm.eps)
        )
        return to

    def gate(self, gate: object, source: Slot, target: str) -> Slot:
        if not isinstance(gate, NativeGate):
            raise NotCompiled
        to = self._slot(target, source.width // 2)
        self._add(_Operation(_GATE, source.at, to.at, _NOTHING, None, None, 0, to.width, gate.kind, 0, 0.0))
        return to

    def attend(
        self, layer: int, source: Slot, target: str, width: int, rope: int, norm: tuple[Tensor, float] | None
    ) -> Slot:
        """width: of all heads of queries; rope: which of the step's turns; norm: of heads, its weight and eps."""
        to = self._slot(target, width)
        weight, eps = (None, 0.0) if norm is None else (norm[0].data_ptr(), norm[1])
        self._add(_Operation(_ATTEND, source.at, to.at, _NOTHING, weight, None, 0, 0, layer, rope, eps))
        return to

    def run(self, x: Tensor, turns: Sequence[Tensor], attention: NativeAttention, pending: Slot) -> Tensor:
        """The residual stream behind the last layer.

        x        [tokens, width], before the first
        turns    of each rope, as `Turn` has them
        pending  what the last layer gives, still to be added
        """
        if len(self._table) != len(self._operations):
            self._table = (_Operation * len(self._operations))(*self._operations)
        rows = len(x)
        room = torch.empty(rows * self._row_bytes // self._activations.itemsize, dtype=self._activations)
        stream = self._rows(room, rows, self.stream).copy_(x)
        self._call(
            ctypes.addressof(self._table),
            len(self._table),
            room.data_ptr(),
            rows,
            attention.step_at,
            attention.views_at,
            (ctypes.c_void_p * len(turns))(*(each.data_ptr() for each in turns)),
            torch.get_num_threads(),
        )
        return stream.add_(self._rows(room, rows, pending))

    def _rows(self, room: Tensor, rows: int, slot: Slot) -> Tensor:
        begin = rows * slot.at // self._activations.itemsize
        return room[begin : begin + rows * slot.width].view(rows, slot.width)

    def _slot(self, name: str, width: int) -> Slot:
        key = name, width
        if key not in self._slots:
            self._slots[key] = Slot(self._row_bytes, width)
            self._row_bytes += -(-width * self._activations.itemsize // _ALIGNMENT) * _ALIGNMENT
        return self._slots[key]

    def _add(self, operation: _Operation) -> None:
        self._operations.append(operation)
