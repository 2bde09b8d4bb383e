"""Logprobs: how likely the model finds a token, and which ones it finds most likely."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pdserve.sampling import TokenLogprobs


def token_logprobs(logits: Tensor, token_ids: Sequence[int], top: int) -> list[TokenLogprobs]:
    """Natural logarithms of softmax(logits), in float64, given as float32.

    logits     [rows, vocabulary] float32
    token_ids  one a row
    top        most likely tokens to name, best first; of equals the lower id
    Each row depends on itself only.
    """
    logprobs = torch.log_softmax(logits, dim=-1, dtype=torch.float64)
    chosen = logprobs.gather(1, torch.tensor(token_ids).unsqueeze(1)).squeeze(1)
    values = chosen.to(torch.float32).tolist()
    if not top:
        return [TokenLogprobs(value) for value in values]
    found: list[TokenLogprobs] = []
    for row, value in enumerate(values):
        ids = best_ids(logits[row], top)
        best = logprobs[row].index_select(0, ids).to(torch.float32).tolist()
        found.append(TokenLogprobs(value, tuple(zip(ids.tolist(), best, strict=True))))
    return found


def best_ids(values: Tensor, count: int) -> Tensor:
    """Ids of the largest values, largest first, of equals the lower id.

    values   [n]
    returns  [min(count, n)] int64
    """
    if count >= len(values):
        return torch.sort(values, descending=True, stable=True).indices
    smallest = torch.topk(values, count).values[-1]
    # Ascending, with all that equal the last.
    ids = torch.from_numpy(np.flatnonzero((values >= smallest).numpy()))
    order = torch.sort(values.index_select(0, ids), descending=True, stable=True).indices
    return ids.index_select(0, order[:count])
