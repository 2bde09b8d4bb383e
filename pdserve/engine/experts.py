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

from pdserve.engine.layers import PlainLinear
from pdserve.engine.numerics import Precision
from pdserve.engine.row_tiles import RowFunction


class Router:
    """Which experts a token goes to, and how much each counts. float32 whatever the model's precision is.

    Of equally probable experts the lower numbers are chosen, always: `topk` promises nothing about ties.
    """

    def __init__(self, precision: Precision, weight: Tensor, num_chosen: int, normalised: bool) -> None:
        """weight [experts, hidden]; normalised: the weights of the chosen ones add up to 1."""
        # A copy, since bits may depend on where a matrix lies: a view would begin wherever the file has it.
        self._logits = PlainLinear(weight.to(device=precision.device, dtype=torch.float32, copy=True), None)
        self._num_chosen = num_chosen
        self._normalised = normalised
        self._is_tiled = precision.tiles is not None
        self._tiled = precision.rowwise(f"router to {len(weight)}", self._side_by_side, weight.shape[1])

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights [tokens, chosen] float32 and experts [tokens, chosen] int64, the most probable first."""
        if not self._is_tiled:
            return self._choose(x)
        weights, experts = torch.split(self._tiled(x), self._num_chosen, dim=-1)
        return weights, experts.to(torch.int64)

    def _choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        probabilities = torch.softmax(self._logits(x.to(torch.float32)), dim=-1)
        ordered = torch.sort(probabilities, dim=-1, descending=True, stable=True)
        weights = ordered.values[:, : self._num_chosen]
        if self._normalised:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights, ordered.indices[:, : self._num_chosen]

    def _side_by_side(self, x: Tensor) -> Tensor:
        """Both, [tokens, 2 · chosen] float32."""
        weights, experts = self._choose(x)
        return torch.cat((weights, experts.to(torch.float32)), dim=-1)


class SparseFeedForward:
    """A layer's router and its experts: [tokens, hidden] → [tokens, hidden]."""

    def __init__(self, router: Router, experts: Sequence[RowFunction]) -> None:
        """experts: [tokens, hidden] → [tokens, hidden], any number of tokens."""
        self._router = router
        self._experts = experts

    def __call__(self, x: Tensor) -> Tensor:
        weights, chosen = self._router.choose(x)
        num_tokens, num_chosen = chosen.shape
        flat = chosen.flatten()
        order = torch.sort(flat, stable=True).indices  # places in `flat`, by expert
        tokens = torch.div(order, num_chosen, rounding_mode="floor")
        counts = torch.bincount(flat, minlength=len(self._experts)).tolist()
        parts = [
            expert(x.index_select(0, rows))
            for expert, rows in zip(self._experts, torch.split(tokens, counts), strict=True)
            if len(rows)
        ]
        by_place = torch.empty(len(flat), x.shape[-1], device=x.device)
        by_place.index_copy_(0, order, torch.cat(parts).to(torch.float32))
        return _added(by_place.view(num_tokens, num_chosen, -1), weights).to(x.dtype)


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
