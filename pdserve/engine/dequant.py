"""Block formats to float32; GGUF's bit for bit as the `gguf` package does it.

A row of weights is a run of blocks of 32 values:

    Q8_0  d: f16 | 32 × i8                       value = d·q
    Q4_0  d: f16 | 16 bytes of two nibbles       value = d·(q − 8)
    Q4_1  d: f16 | m: f16 | 16 bytes of nibbles  value = d·q + m

The low nibbles of the 16 bytes are values 0…15, the high ones 16…31. Five-bit blocks: dequant_five.py; K-quants, whose
blocks have 256 values: dequant_k.py; what Hugging Face folders are laid out in: dequant_grouped.py.
Source: ggml's quantised block layouts, https://github.com/ggml-org/ggml (ggml-common.h).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from pdserve.engine.dequant_bits import half, nibbles
from pdserve.engine.dequant_five import q5_0, q5_1
from pdserve.engine.dequant_grouped import decode_grouped
from pdserve.engine.dequant_k import q4_k, q5_k, q6_k
from pdserve.modelstore.grouped_types import GROUPED, UNITS

# Decoded at once: what lies between is small then, and stays in the caches.
_PIECE_VALUES = 1 << 20
PLAIN: dict[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def decode(raw: Tensor, kind: str) -> Tensor:
    """Stored bytes as values: a view for plain types in their own dtype, float32 for block formats.

    raw      [nbytes] uint8, a whole number of units, on any device
    returns  [num_values]
    """
    if kind in PLAIN:
        return _view(raw, PLAIN[kind])
    unit = UNITS[kind]
    blocks = raw.view(-1, unit.num_bytes)
    values = torch.empty(len(blocks), unit.num_values, device=raw.device)
    step = _PIECE_VALUES // unit.num_values
    for start in range(0, len(blocks), step):
        values[start : start + step] = _BLOCK_DECODERS[kind](blocks[start : start + step])
    return values.view(-1)


def _q8_0(blocks: Tensor) -> Tensor:
    return half(blocks[:, :2]) * blocks[:, 2:].contiguous().view(torch.int8).to(torch.float32)


def _q4_0(blocks: Tensor) -> Tensor:
    return half(blocks[:, :2]) * (nibbles(blocks[:, 2:]).to(torch.float32) - 8.0)


def _q4_1(blocks: Tensor) -> Tensor:
    scaled = half(blocks[:, :2]) * nibbles(blocks[:, 4:]).to(torch.float32)
    return scaled + half(blocks[:, 2:4])  # two roundings, as the reference does: no fused multiply-add


_BLOCK_DECODERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": q5_0,
    "Q5_1": q5_1,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
    **{kind: partial(decode_grouped, kind) for kind in GROUPED},
}


def _view(raw: Tensor, dtype: torch.dtype) -> Tensor:
    # A file may place a tensor at an odd offset; only then a copy is needed.
    if raw.data_ptr() % dtype.itemsize or raw.storage_offset() % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype)
