"""A layer's tensors by their short names, and projections put together from them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pdserve.engine.stored_matrix import StoredMatrix
from pdserve.engine.weights import Weights


class Projection(NamedTuple):
    """weight [out, in] and bias [out] as they are stored."""

    weight: StoredMatrix
    bias: Tensor | None


class LayerTensors:
    """What one layer loads. All raise BadModel if a tensor is missing or has another shape."""

    def __init__(self, weights: Weights, index: int) -> None:
        self.index = index
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
