"""GGUF's block formats to float32, bit for bit as the `gguf` package does it.

A row of weights is a run of blocks of 32 values:

    Q8_0  d: f16 | 32 × i8                       value = d·q
    Q4_0  d: f16 | 16 bytes of two nibbles       value = d·(q − 8)
    Q4_1  d: f16 | m: f16 | 16 bytes of nibbles  value = d·q + m

The low nibbles of the 16 bytes are values 0…15, the high ones 16…31.
Source: ggml's quantised block layouts, https://github.com/ggml-org/ggml (ggml-common.h).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

BLOCK_VALUES = 32

# Stored type: (values, bytes) of its smallest unit.
UNITS: dict[str, tuple[int, int]] = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q8_0": (BLOCK_VALUES, 34),
    "Q4_0": (BLOCK_VALUES, 18),
    "Q4_1": (BLOCK_VALUES, 20),
}

_PLAIN: dict[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def stored_bytes(kind: str, num_values: int) -> int:
    """Bytes that so many values take; num_values is a multiple of the type's unit."""
    values, size = UNITS[kind]
    return num_values // values * size


def decode(raw: Tensor, kind: str) -> Tensor:
    """Stored bytes as values: a view for plain types in their own dtype, float32 for block formats.

    raw      [nbytes] uint8, a whole number of units
    returns  [num_values]
    """
    if kind in _PLAIN:
        return _view(raw, _PLAIN[kind])
    return _BLOCK_DECODERS[kind](raw.view(-1, UNITS[kind][1])).view(-1)


def _q8_0(blocks: Tensor) -> Tensor:
    return _half(blocks[:, :2]) * blocks[:, 2:].contiguous().view(torch.int8).to(torch.float32)


def _q4_0(blocks: Tensor) -> Tensor:
    return _half(blocks[:, :2]) * (_nibbles(blocks[:, 2:]) - 8.0)


def _q4_1(blocks: Tensor) -> Tensor:
    scaled = _half(blocks[:, :2]) * _nibbles(blocks[:, 4:])
    return scaled + _half(blocks[:, 2:4])  # two roundings, as the reference does: no fused multiply-add


_BLOCK_DECODERS: dict[str, Callable[[Tensor], Tensor]] = {"Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1}


def _half(columns: Tensor) -> Tensor:
    """Two bytes a block as float32, [blocks, 1]."""
    return columns.contiguous().view(torch.float16).to(torch.float32)


def _nibbles(packed: Tensor) -> Tensor:
    """[blocks, 16] bytes as [blocks, 32] float32 in 0…15."""
    return torch.cat((packed & 15, packed >> 4), dim=1).to(torch.float32)


def _view(raw: Tensor, dtype: torch.dtype) -> Tensor:
    # A file may place a tensor at an odd offset; only then a copy is needed.
    if raw.data_ptr() % dtype.itemsize or raw.storage_offset() % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype)
