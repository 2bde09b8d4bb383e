"""GGUF's K-quants, super-blocks of 256 values with scales of their own, to float32.

    Q4_K  d, m: f16 | 12 bytes of scales | 128 bytes of nibbles                value = (d·s)·q − (m·t)
    Q5_K  d, m: f16 | 12 bytes of scales | 32 bytes of fifth bits | 128 …       value = (d·s)·q − (m·t)
    Q6_K  128 bytes of nibbles | 64 bytes of bits 4 and 5 | 16 × i8 s | d: f16  value = (d·s)·(q − 32)

In Q4_K and Q5_K each run of 32 values has a six-bit scale s and a six-bit minimum t. The 12 bytes hold, with S and T
for runs 0…3 and s and t for runs 4…7:

    byte 0…3   ss SSSSSS    two top bits of s, all of S
    byte 4…7   tt TTTTTT    the same for t and T
    byte 8…11  tttt ssss    the four low bits of t and of s

A group of 32 bytes carries two runs of nibbles, low then high; byte j's bit r of the fifth bits belongs to value j of
run r. In Q6_K each run of 16 values has a signed scale; 64 bytes carry two runs of 64 nibbles, and 32 bytes carry the
upper two bits of four runs of 32.
Source: ggml's quantised block layouts, https://github.com/ggml-org/ggml (ggml-common.h, ggml-quants.c).
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdserve.engine.dequant_bits import half, nibbles

SUPER_VALUES = 256


def q4_k(blocks: Tensor) -> Tensor:
    """[blocks, 144] bytes → [blocks, 256] float32."""
    q = nibbles(blocks[:, 16:].reshape(-1, 4, 32)).view(-1, 8, 32)
    return _scaled_less_minimum(blocks, q)


def q5_k(blocks: Tensor) -> Tensor:
    """[blocks, 176] bytes → [blocks, 256] float32."""
    low = nibbles(blocks[:, 48:].reshape(-1, 4, 32)).view(-1, 8, 32)
    run = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
    fifth = (blocks[:, None, 16:48] >> run) & 1
    return _scaled_less_minimum(blocks, low | (fifth << 4))


def q6_k(blocks: Tensor) -> Tensor:
    """[blocks, 210] bytes → [blocks, 256] float32."""
    low = nibbles(blocks[:, :128].reshape(-1, 2, 64)).view(-1, 2, 4, 32)
    shift = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)[:, None]
    upper = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shift) & 3
    q = (low | (upper << 4)).to(torch.float32) - 32.0
    scales = half(blocks[:, 208:]) * blocks[:, 192:208].contiguous().view(torch.int8).to(torch.float32)
    return (scales[:, :, None] * q.view(-1, 16, 16)).flatten(1)


def _scaled_less_minimum(blocks: Tensor, q: Tensor) -> Tensor:
    """The common end of Q4_K and Q5_K.

    q  [blocks, 8, 32] uint8
    """
    first, second, mixed = blocks[:, 4:16].reshape(-1, 3, 4).unbind(1)
    scale = torch.cat((first & 63, (mixed & 15) | ((first >> 2) & 48)), dim=1)
    minimum = torch.cat((second & 63, (mixed >> 4) | ((second >> 2) & 48)), dim=1)
    scale = half(blocks[:, :2]) * scale.to(torch.float32)
    minimum = half(blocks[:, 2:4]) * minimum.to(torch.float32)
    return (scale[:, :, None] * q.to(torch.float32) - minimum[:, :, None]).flatten(1)
