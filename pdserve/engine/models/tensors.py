"""A layer's tensors by their short names, and projections put together from them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pdserve.engine.parallel.shard import Shard
from pdserve.engine.stored_matrix import StoredMatrix
from pdserve.engine.weights import Weights


class Projection(NamedTuple):
    """weight [out, in] and bias [out] as they are stored."""

    weight: StoredMatrix
    bias: Tensor | None

    def outputs(self, part: slice) -> Projection:
        """Some of its rows."""
        return Projection(
            self.weight.rows(part.start, part.stop), None if self.bias is None else self.bias[part]
        )

    def paired_outputs(self, part: slice) -> Projection:
        """The same rows of its upper and of its lower half: where two projections are stored as one."""
        half = len(self.weight) // 2
        if part == slice(0, half):
            return self
        return stacked(self.outputs(part), self.outputs(slice(half + part.start, half + part.stop)))

    def inputs(self, part: slice, *, adds_bias: bool) -> Projection:
        """Some of its columns; the results of all such parts add up to the whole's, so one of them adds the bias."""
        return Projection(self.weight.columns(part.start, part.stop), self.bias if adds_bias else None)


class LayerTensors:
    """What one layer loads. All raise BadModel if a tensor is missing or has another shape.

    shard  the part of it that this process has
    """

    def __init__(self, weights: Weights, index: int, shard: Shard) -> None:
        self.index = index
        self.shard = shard
        self._weights = weights
        self._prefix = f"model.layers.{index}."

    def matrix(self, name: str, rows: int, columns: int) -> StoredMatrix:
        return self._weights.matrix(f"{self._prefix}{name}.weight", (rows, columns))

    def projection(self, name: str, rows: int, columns: int, has_bias: bool = False) -> Projection:
        bias = self._weights.load(f"{self._prefix}{name}.bias", (rows,)) if has_bias else None
        return Projection(self.matrix(name, rows, columns), bias)

    def norm(self, name: str, size: int) -> Tensor:
        return self._weights.load(f"{self._prefix}{name}.weight", (size,))

    def release(self) -> None:
        """What was loaded has been packed: see `Weights.release`."""
        self._weights.release()


def stacked(*projections: Projection) -> Projection:
    """Several projections of one input as one: fewer, larger kernels."""
    biases = [projection.bias for projection in projections if projection.bias is not None]
    parts = [part for projection in projections for part in projection.weight.parts]
    weight = StoredMatrix(parts, projections[0].weight.shape[1])
    return Projection(weight, torch.cat(biases) if biases else None)
