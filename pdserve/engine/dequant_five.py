"""GGUF's five-bit blocks of 32 values to float32.

    Q5_0  d: f16 |          h: u32 | 16 bytes of two nibbles   value = d·(q − 16)
    Q5_1  d: f16 | m: f16 | h: u32 | 16 bytes of two nibbles   value = d·q + m

The fifth bit of value i is bit i of h; nibbles lie as in the four-bit blocks (dequant.py).
Source: ggml's quantised block layouts, https://github.com/ggml-org/ggml (ggml-common.h).
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdserve.engine.dequant_bits import half, nibbles


def q5_0(blocks: Tensor) -> Tensor:
    """[blocks, 22] bytes → [blocks, 32] float32."""
    return half(blocks[:, :2]) * (_five_bits(blocks[:, 2:6], blocks[:, 6:]).to(torch.float32) - 16.0)


def q5_1(blocks: Tensor) -> Tensor:
    """[blocks, 24] bytes → [blocks, 32] float32."""
    scaled = half(blocks[:, :2]) * _five_bits(blocks[:, 4:8], blocks[:, 8:]).to(torch.float32)
    return scaled + half(blocks[:, 2:4])  # two roundings, as the reference does: no fused multiply-add


def _five_bits(high: Tensor, packed: Tensor) -> Tensor:
    """[blocks, 4] and [blocks, 16] bytes as [blocks, 32] uint8 in 0…31."""
    bit = torch.arange(8, dtype=torch.uint8, device=high.device)
    fifth = ((high[:, :, None] >> bit) & 1).flatten(1)
    return nibbles(packed) | (fifth << 4)
