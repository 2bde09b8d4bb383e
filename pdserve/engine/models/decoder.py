"""What the runner needs of a model, whatever its family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from pdserve.engine.attention import StepAttention
from pdserve.engine.model_config import ModelConfig
from pdserve.engine.numerics import Precision, RowFunction
from pdserve.engine.weights import Weights


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One forward pass.

    token_ids   [tokens] int64
    positions   [tokens] int64
    logit_rows  [rows] int64: the tokens whose hidden states are wanted, to make logits of
    """

    token_ids: Tensor
    positions: Tensor
    logit_rows: Tensor
    attention: StepAttention


class Model(Protocol):
    """A decoder-only transformer with its weights packed."""

    def forward(self, step: StepInputs) -> Tensor:
        """What `logits` takes, of the wanted rows: [rows, hidden], the last layer's output."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Last norm and output head, [rows, vocabulary] float32.

        Apart from `forward`, since the logits of a whole chunk at once would be larger than its KV.
        """
        ...

    def row_functions(self) -> dict[str, tuple[RowFunction, int]]:
        """All that is done row by row, with its input width, one of each shape: what a probe must try."""
        ...


class ModelClass(Protocol):
    """How to load a model. Raises BadModel if a tensor is missing or has another shape."""

    def __call__(self, config: ModelConfig, weights: Weights, precision: Precision) -> Model: ...
