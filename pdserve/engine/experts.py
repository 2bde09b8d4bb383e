"""Mixture of experts: each token goes through the few feed-forwards that a router chooses for it.

    tokens      a     b     c            chosen: a → 2, 0    b → 2, 3    c → 0, 2
    by expert   0: a c │ 2: a b c │ 3: b          each expert's matrices are multiplied once a step
    by token    a: 2 0 │ b: 2 3 │ c: 0 2          weighted and added in this order

Source: https://arxiv.org/abs/2401.04088, "Sparse mixture of experts"; as transformers computes Mixtral and Qwen3-MoE.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from pdserve.engine.layers import PlainLinear, make_linear, swiglu, undivided
from pdserve.engine.numerics import Precision, RowFunction, safe_row_padding


class Router:
    """Which experts a token goes to, and how much each counts. float32 whatever the model's precision is.

    Of equally probable experts the lower numbers are chosen, always: `topk` promises nothing about ties.
    """

    def __init__(self, weight: Tensor, num_chosen: int, normalised: bool) -> None:
        """weight [experts, hidden]; normalised: the weights of the chosen ones add up to 1."""
        # A copy, since bits may depend on where a matrix lies: a view would begin wherever the file has it.
        self._logits = PlainLinear(weight.to(torch.float32, copy=True), None)
        self._num_chosen = num_chosen
        self._normalised = normalised

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights [tokens, chosen] float32 and experts [tokens, chosen] int64, the most probable first."""
        probabilities = torch.softmax(self._logits(x.to(torch.float32)), dim=-1)
        ordered = torch.sort(probabilities, dim=-1, descending=True, stable=True)
        weights = ordered.values[:, : self._num_chosen]
        if self._normalised:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights, ordered.indices[:, : self._num_chosen]

    def choices(self, x: Tensor) -> Tensor:
        """Both side by side, [tokens, 2 · chosen]: what a probe compares."""
        weights, experts = self.choose(x)
        return torch.cat((weights, experts.to(torch.float32)), dim=-1)


class Expert:
    """One SwiGLU feed-forward, its matrices packed: [tokens, hidden] → [tokens, hidden]."""

    def __init__(self, precision: Precision, gate: Tensor, up: Tensor, down: Tensor) -> None:
        """gate and up [ffn, hidden], down [hidden, ffn]."""
        self._widths = (gate.shape[1], gate.shape[0])
        self._gate_up = make_linear(precision, torch.cat((gate, up)))
        self._down = make_linear(precision, down)
        self._swiglu = undivided(swiglu) if precision.undivided else swiglu

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(self._swiglu(self._gate_up(x)))

    def row_functions(self) -> dict[str, tuple[RowFunction, int]]:
        """As `Model.row_functions`."""
        hidden, ffn = self._widths
        return {
            "expert gate_up": (self._gate_up, hidden),
            "expert swiglu": (self._swiglu, 2 * ffn),
            "expert down": (self._down, ffn),
        }


def expert_row_padding(expert: Expert, precision: Precision) -> int:
    """To which multiple an expert's rows are padded: 1, or in deterministic mode what keeps their bits.

    How many tokens of a step choose an expert depends on who shares the step. One of several equal experts is enough.
    Raises BadModel if this machine can't be deterministic.
    """
    return safe_row_padding(expert.row_functions(), precision.compute) if precision.undivided else 1


class SparseFeedForward:
    """A layer's router and its experts: [tokens, hidden] → [tokens, hidden]."""

    def __init__(self, router: Router, experts: Sequence[Expert], row_padding: int) -> None:
        """row_padding: `expert_row_padding` of one of the experts."""
        self._router = router
        self._experts = experts
        self._row_padding = row_padding

    def __call__(self, x: Tensor) -> Tensor:
        weights, chosen = self._router.choose(x)
        num_tokens, num_chosen = chosen.shape
        flat = chosen.flatten()
        order = torch.sort(flat, stable=True).indices  # places in `flat`, by expert
        tokens = torch.div(order, num_chosen, rounding_mode="floor")
        counts = torch.bincount(flat, minlength=len(self._experts)).tolist()
        parts = [
            self._apply(expert, x, rows)
            for expert, rows in zip(self._experts, torch.split(tokens, counts), strict=True)
            if len(rows)
        ]
        by_place = torch.empty(len(flat), x.shape[-1])
        by_place.index_copy_(0, order, torch.cat(parts).to(torch.float32))
        return _added(by_place.view(num_tokens, num_chosen, -1), weights).to(x.dtype)

    def _apply(self, expert: Expert, x: Tensor, rows: Tensor) -> Tensor:
        """What an expert makes of some rows of x; padding repeats row 0."""
        missing = -len(rows) % self._row_padding
        padded = functional.pad(rows, (0, missing)) if missing else rows
        return expert(x.index_select(0, padded))[: len(rows)]

    def row_functions(self) -> dict[str, tuple[RowFunction, int]]:
        """As `Model.row_functions`. The whole of it as well: there every expert gets another number of rows."""
        functions = self._experts[0].row_functions()
        hidden = functions["expert gate_up"][1]
        return {"router": (self._router.choices, hidden), "experts": (self, hidden)}


def _added(outputs: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum over the chosen experts, one after the other: each step is one rounding, whoever computes it.

    outputs  [tokens, chosen, hidden] float32, overwritten
    weights  [tokens, chosen]
    """
    outputs.mul_(weights.unsqueeze(-1))
    total = outputs[:, 0]
    for place in range(1, outputs.shape[1]):
        total = total + outputs[:, place]
    return total
