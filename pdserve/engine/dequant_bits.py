"""Bits out of the bytes of quantised blocks."""

from __future__ import annotations

import torch
from torch import Tensor


def half(columns: Tensor) -> Tensor:
    """Two bytes a block as float32, [blocks, 1]."""
    return columns.contiguous().view(torch.float16).to(torch.float32)


def nibbles(packed: Tensor) -> Tensor:
    """[…, n] bytes as […, 2n] uint8 in 0…15: the low nibbles, then the high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)
