"""What stands behind attention in a layer: the gated feed-forward of dense models, and what any other must offer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from pdserve.engine.layers import geglu, make_linear, swiglu
from pdserve.engine.model_config import ModelConfig
from pdserve.engine.models.tensors import LayerTensors, Projection, stacked
from pdserve.engine.native.program import Program, Slot
from pdserve.engine.native.rows import NativeGate, fits
from pdserve.engine.numerics import Precision
from pdserve.engine.row_tiles import RowFunction

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": swiglu, "gelu_tanh": geglu}


class FeedForward(Protocol):
    """[tokens, hidden] → [tokens, hidden], each token from itself alone; both in the dtype of the activations.

    A rank has some columns of it, and all ranks' results add up to the whole's.
    """

    def __call__(self, x: Tensor) -> Tensor: ...


class MakeFeedForward(Protocol):
    """Loads and packs the feed-forward of one layer. Raises BadModel if a tensor is missing or has another shape."""

    def __call__(self, config: ModelConfig, tensors: LayerTensors, precision: Precision) -> FeedForward: ...


def gated_feed_forward(config: ModelConfig, tensors: LayerTensors, precision: Precision) -> FeedForward:
    """gate_proj, up_proj and down_proj."""
    hidden, ffn = config.hidden_size, config.ffn_size
    shard, part = tensors.shard, tensors.shard.part(ffn)
    gate_up = stacked(
        tensors.projection("mlp.gate_proj", ffn, hidden, config.mlp_bias).outputs(part),
        tensors.projection("mlp.up_proj", ffn, hidden, config.mlp_bias).outputs(part),
    )
    down = tensors.projection("mlp.down_proj", hidden, ffn, config.mlp_bias)
    down = down.inputs(part, adds_bias=shard.rank == 0)
    return GatedFeedForward(gate_up, down, config.activation, precision)


class GatedFeedForward:
    """down(activation(gate) · up); gate and up are one matrix."""

    def __init__(self, gate_up: Projection, down: Projection, activation: str, precision: Precision) -> None:
        """gate_up [2 · ffn, hidden], gate first."""
        self._gate_up = make_linear(precision, *gate_up)
        self._down = make_linear(precision, *down)
        self._activate = _activation(activation, len(gate_up.weight), precision)

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(self._activate(self._gate_up(x)))

    def compile(self, program: Program, x: Slot) -> Slot:
        """The same as operations. Raises NotCompiled."""
        gated = program.gate(self._activate, program.product(self._gate_up, x, "wide"), "gated")
        return program.product(self._down, gated, "out")


def _activation(name: str, width: int, precision: Precision) -> RowFunction:
    """width: of gate and up together."""
    if precision.kernels is not None and fits(width // 2):
        gate = NativeGate(precision.kernels, name)
        precision.uncut(f"compiled {name} of {width}", gate, width)
        return gate
    return precision.rowwise(f"{name} of {width}", _ACTIVATIONS[name], width)
