"""The decoder that all families are: embeddings, layers of attention and feed-forward on a residual stream, a head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pdserve.engine.attention import StepAttention
from pdserve.engine.device.packed_linear import on_device
from pdserve.engine.layers import RmsNorm
from pdserve.engine.model_config import ModelConfig
from pdserve.engine.models.family import Family
from pdserve.engine.models.feed_forward import GatedFeedForward, MakeFeedForward
from pdserve.engine.models.head import Head
from pdserve.engine.models.self_attention import LoadQkv, SelfAttention
from pdserve.engine.models.tensors import LayerTensors
from pdserve.engine.native.attention import NativeAttention
from pdserve.engine.native.program import NotCompiled, Program, Slot
from pdserve.engine.native.rows import NativeNorm, fits
from pdserve.engine.numerics import Precision
from pdserve.engine.parallel.team import ALONE, Team
from pdserve.engine.rotary import Rotary, drawn_positions
from pdserve.engine.row_table import RowTable
from pdserve.engine.row_tiles import RowFunction
from pdserve.engine.stored_matrix import StoredMatrix
from pdserve.engine.weights import Weights
from pdserve.modelstore.expected_tensors import HEAD


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


class Decoder:
    """A decoder-only transformer with its weights packed; tensor names are those of transformers' checkpoints."""

    def __init__(
        self,
        config: ModelConfig,
        family: Family,
        weights: Weights,
        precision: Precision,
        team: Team = ALONE,
    ) -> None:
        """team: the ranks that it is divided among, of which this is one. Only this rank's part is read.

        Raises BadModel if a tensor is missing or has another shape, or if the model can't be divided so.
        """
        team.shard.config(config)  # before the first of its gigabytes is read
        self._stored = torch.float32 if precision.name == "float32" else torch.bfloat16
        table, table_shape = "model.embed_tokens.weight", (config.vocab_size, config.hidden_size)
        embeddings = weights.matrix(table, table_shape)
        if precision.device is not None:
            embeddings = _resident(embeddings, precision.device, self._stored)
        self._embeddings = RowTable(embeddings)
        self._embedding_scale = float(torch.tensor(config.embedding_scale).to(self._stored))
        self._compute = precision.compute
        make_feed_forward = family.feed_forwards()
        self._layers: list[_Layer] = []
        for index in range(config.num_layers):
            tensors = LayerTensors(weights, index, team.shard)
            self._layers.append(_Layer(config, family.load_qkv, make_feed_forward, tensors, precision, team))
            weights.release()
        self._norm = _norm(config, weights.load("model.norm.weight", (config.hidden_size,)), precision)
        # One that is stored counts whatever the config says, as in transformers 5: its numbers may be others.
        head = table if config.tied_embeddings and HEAD not in weights else HEAD
        matrix = embeddings if head == table else weights.matrix(head, table_shape)
        self._head = Head(precision, matrix, config.final_softcap, team)
        weights.release()
        ropes = (config.rope,) if config.local_rope is None else (config.rope, config.local_rope)
        rotaries = [Rotary(rope, config.head_dim, config.rotary_dim, precision.device) for rope in ropes]
        self._turns = [
            precision.rowwise("turns of positions", rotary.turns, 1, lambda rows: (drawn_positions(rows),))
            for rotary in rotaries
        ]
        self._vocab_size = config.vocab_size
        self._program = self._compiled(config.hidden_size, precision, team)

    def _compiled(self, width: int, precision: Precision, team: Team) -> tuple[Program, Slot] | None:
        """All layers, and where the last one's result is; None where anything of them is for Python to do."""
        if precision.kernels is None or team.shard.size > 1:
            return None
        program, fed = Program(precision.kernels, width), None
        try:
            for layer in self._layers:
                fed = layer.compile(program, fed)
        except NotCompiled:
            return None
        return None if fed is None else (program, fed)

    @property
    def is_one_call(self) -> bool:
        """Whether compiled kernels compute all layers in one call."""
        return self._program is not None

    def forward(self, step: StepInputs) -> Tensor:
        """What `logits` takes, of the wanted rows: [rows, hidden], the last layer's output."""
        x = self._embeddings.rows(step.token_ids).to(self._stored).to(self._compute)
        if self._embedding_scale != 1.0:
            x.mul_(self._embedding_scale)
        turns = [of_positions(step.positions) for of_positions in self._turns]
        if self._program is not None and isinstance(step.attention, NativeAttention):
            program, last = self._program
            x = program.run(x, turns, step.attention, last)
        else:
            for layer in self._layers:
                layer.apply_(x, turns, step.attention)
        return x.index_select(0, step.logit_rows)

    def logits(self, hidden: Tensor) -> Tensor:
        """Last norm and output head, [rows, vocabulary] float32; at ranks other than 0 without meaning.

        Apart from `forward`, since the logits of a whole chunk at once would be larger than its KV.
        """
        if not len(hidden):
            return torch.empty(0, self._vocab_size, device=hidden.device)
        return self._head(self._norm(hidden))


class _Layer:
    """Attention and feed-forward, each behind a norm, and where the config says so with one behind it, too."""

    def __init__(
        self,
        config: ModelConfig,
        load_qkv: LoadQkv,
        make_feed_forward: MakeFeedForward,
        tensors: LayerTensors,
        precision: Precision,
        team: Team,
    ) -> None:
        def norm(name: str) -> _Norm:
            return _norm(config, tensors.norm(name, config.hidden_size), precision)

        self._team = team
        self._attention = SelfAttention(config, load_qkv, tensors, precision)
        self._feed_forward = make_feed_forward(config, tensors, precision)
        self._rope = 1 if config.local_rope is not None and config.windows[tensors.index] else 0
        self._before_attention = norm("input_layernorm")
        self._after_attention: _Norm | None = None
        self._after_feed_forward: _Norm | None = None
        if config.has_post_norms:
            self._after_attention = norm("post_attention_layernorm")
            self._before_feed_forward = norm("pre_feedforward_layernorm")
            self._after_feed_forward = norm("post_feedforward_layernorm")
        else:
            self._before_feed_forward = norm("post_attention_layernorm")

    def apply_(self, x: Tensor, turns: list[Tensor], attention: StepAttention) -> None:
        """Add this layer's attention and feed-forward to the residual stream x, [tokens, hidden]."""
        attended = self._attention(self._before_attention(x), turns[self._rope], attention)
        attended = self._team.add_up(attended)
        if self._after_attention is not None:
            attended = self._after_attention(attended)
        fed = self._team.add_up(self._feed_forward(self._before_feed_forward.after_adding_(x, attended)))
        x.add_(fed if self._after_feed_forward is None else self._after_feed_forward(fed))

    def compile(self, program: Program, fed: Slot | None) -> Slot:
        """The same as operations, but for the last sum: fed is what the layer before adds to the stream, the result
        what this one does. Raises NotCompiled.
        """
        x = program.norm(self._before_attention, program.stream, "normed", fed)
        attended = self._attention.compile(program, x, self._rope)
        if self._after_attention is not None:
            attended = program.norm(self._after_attention, attended, "out")
        if not isinstance(self._feed_forward, GatedFeedForward):
            raise NotCompiled
        x = program.norm(self._before_feed_forward, program.stream, "normed", attended)
        fed = self._feed_forward.compile(program, x)
        return fed if self._after_feed_forward is None else program.norm(self._after_feed_forward, fed, "out")


class _Norm(Protocol):
    """An RMSNorm of rows, [tokens, hidden] → [tokens, hidden]."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def after_adding_(self, x: Tensor, more: Tensor) -> Tensor:
        """The norm of x + more, which x becomes."""
        ...


class _TorchNorm:
    def __init__(self, function: RowFunction) -> None:
        self._function = function

    def __call__(self, x: Tensor) -> Tensor:
        return self._function(x)

    def after_adding_(self, x: Tensor, more: Tensor) -> Tensor:
        return self._function(x.add_(more))


def _resident(matrix: StoredMatrix, device: torch.device, dtype: torch.dtype) -> StoredMatrix:
    """In the device's memory: quantised as it is stored, else as values of this dtype."""
    if matrix.is_quantised:
        return on_device(matrix, device)
    return StoredMatrix.plain(matrix.values().to(device, dtype, copy=True).contiguous())


def _norm(config: ModelConfig, weight: Tensor, precision: Precision) -> _Norm:
    if precision.kernels is not None and fits(len(weight)):
        native = NativeNorm(precision.kernels, weight, config.norm_eps, config.norm_offset)
        precision.uncut(f"compiled norm of {len(weight)}", native, len(weight))
        return native
    norm = RmsNorm(weight.to(device=precision.device), config.norm_eps, precision.compute, config.norm_offset)
    return _TorchNorm(precision.rowwise(f"norm of {len(weight)}", norm, len(weight)))
