"""Groups of codes with scales of 32 bits: what quantised Hugging Face folders are laid out in (grouped_types.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from pdserve.modelstore.grouped_types import base_of


def decode_grouped(kind: str, blocks: Tensor) -> Tensor:
    """blocks [units, bytes of a unit] uint8 → [units, values] float32; each value is rounded once."""
    scale = _floats(blocks[:, :4])
    base = base_of(kind)
    if base == "F8":
        return scale * blocks[:, 4:].contiguous().view(torch.float8_e4m3fn).to(torch.float32)
    return scale * centred_codes(kind, blocks)


def centred_codes(kind: str, blocks: Tensor) -> Tensor:
    """[units, values] float32 whole numbers: codes less their zero point. kind: of integers"""
    base = base_of(kind)
    if base == "I8":
        return blocks[:, 4:].contiguous().view(torch.int8).to(torch.float32)
    if base == "I8Z":
        return blocks[:, 8:].to(torch.float32) - _floats(blocks[:, 4:8])
    if base == "I4":
        return neighbours(blocks[:, 4:]).to(torch.float32) - 8.0
    assert base == "I4Z", kind
    return neighbours(blocks[:, 8:]).to(torch.float32) - _floats(blocks[:, 4:8])


def neighbours(packed: Tensor) -> Tensor:
    """[…, n] bytes as […, 2n] uint8 in 0…15: each byte's low nibble, then its high one."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def _floats(columns: Tensor) -> Tensor:
    """[units, 4] bytes as [units, 1] float32."""
    return columns.contiguous().view(torch.float32)
