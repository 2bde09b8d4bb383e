"""Compiled passes over rows of logits: kernels/scan.c."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pdserve.engine.native.library import Kernels
from pdserve.engine.row_scan import TORCH_SCAN
from pdserve.engine.token_filters import Shortlist
from pdserve.sampling import SamplingParams


class NativeScan:
    """Implements `RowScan`; ids and numbers are those of `TorchScan`, bit for bit."""

    def __init__(self, kernels: Kernels) -> None:
        self._best = kernels.functions.pd_best
        self._shortlist = kernels.functions.pd_shortlist

    def best(self, logits: Tensor) -> tuple[list[int], list[bool]]:
        logits = logits.contiguous()
        assert logits.dtype is torch.float32
        best = torch.empty(len(logits), dtype=torch.int64)
        sound = torch.empty(len(logits), dtype=torch.bool)
        num_threads = torch.get_num_threads()
        self._best(logits.data_ptr(), *logits.shape, best.data_ptr(), sound.data_ptr(), num_threads)
        return best.tolist(), sound.tolist()

    def shortlist(self, logits: Tensor, best: int, params: SamplingParams) -> Shortlist:
        size = len(logits)
        top_k = params.top_k if params.top_k < size else 0
        if not top_k and not params.min_p:
            return TORCH_SCAN.shortlist(logits, best, params)  # nothing is left out: no scan
        logits = logits.contiguous()
        assert logits.dtype is torch.float32
        room = torch.empty(2 * top_k, dtype=torch.float32)
        # Of the size of the vocabulary; what isn't written is never backed by memory.
        ids, left = torch.empty(size, dtype=torch.int64), torch.empty(size, dtype=torch.float64)
        count = torch.empty(1, dtype=torch.int64)
        lowest = math.log(params.min_p) if params.min_p else -math.inf
        self._shortlist(
            logits.data_ptr(), size, float(logits[best]), params.temperature, lowest, top_k,
            room.data_ptr(), ids.data_ptr(), left.data_ptr(), count.data_ptr(),
        )  # fmt: skip
        found = int(count)
        return Shortlist(ids[:found], left[:found])
