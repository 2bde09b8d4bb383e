"""What sampling looks for in whole rows of logits, by torch; native/scan.py finds the same by compiled kernels."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from pdserve.engine.token_filters import Shortlist, shortlist
from pdserve.sampling import SamplingParams


class RowScan(Protocol):
    """Used from one thread at a time. Changes no logits."""

    def best(self, logits: Tensor) -> tuple[list[int], list[bool]]:
        """The largest number of each row, and whether the row is sound.

        logits   [rows, vocabulary] float32
        returns  of each row: the lowest id of its largest logit, of no meaning if the row isn't sound; whether all are
                 finite
        """

    def shortlist(self, logits: Tensor, best: int, params: SamplingParams) -> Shortlist:
        """Temperature, then min-p and top-k.

        logits  [vocabulary] float32, all finite; the largest is at `best`; temperature above 0
        """


class TorchScan:
    """Implements `RowScan`."""

    def best(self, logits: Tensor) -> tuple[list[int], list[bool]]:
        # One pass finds NaN and ±inf in any row: a sum of finite float32 in float64 is finite.
        sound = torch.isfinite(logits.sum(dim=-1, dtype=torch.float64)).tolist()
        return logits.argmax(dim=-1).tolist(), sound

    def shortlist(self, logits: Tensor, best: int, params: SamplingParams) -> Shortlist:
        wide = logits.to(torch.float64)
        return shortlist((wide - wide[best]) / params.temperature, params)


TORCH_SCAN = TorchScan()
