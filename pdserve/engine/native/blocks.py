"""Groups of a Hugging Face folder as the blocks of 32 that compiled kernels multiply: made once, at load.

    I8  → Q8_0    I4 → Q4_0    the same codes; exact where a group's scale is a 16-bit number with 5 bits of exponent
    I4Z → Q4_1    the same codes; −s·z is rounded to 16 bits, by less than 1/64 of a step

A block's scale has 16 bits: one that is stored in 32 bits or bfloat16 is rounded, by at most 1/2048 of itself in usual
sizes. What would be rounded by more than rounding to bfloat16 does (1/512) isn't made a block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdserve.engine.dequant_grouped import centred_codes, neighbours
from pdserve.engine.grouped_matrix import decoding
from pdserve.engine.stored_matrix import StoredMatrix, StoredRows
from pdserve.modelstore.grouped_types import GROUPED, UNITS, base_of

_BLOCK = 32
_BLOCKS = {"I8": "Q8_0", "I4": "Q4_0", "I4Z": "Q4_1"}
_MOST_OF_SCALE = 2**-9
_MOST_OF_STEP = 2**-6


def as_multiplied(matrix: StoredMatrix) -> StoredMatrix | None:
    """A quantised matrix in formats of compiled kernels. None: it has to be decoded, which is logged."""
    parts = [_part(part) for part in matrix.parts]
    return (
        None if None in parts else StoredMatrix([part for part in parts if part is not None], matrix.shape[1])
    )


def _part(part: StoredRows) -> StoredRows | None:
    if part.kind not in GROUPED:
        return part
    kind = _BLOCKS.get(base_of(part.kind))
    if kind is None:
        decoding(part.kind, "compiled kernels have no such product")
        return None
    unit = UNITS[part.kind]
    units = part.gathered().view(-1, unit.num_bytes)
    scale = units[:, :4].contiguous().view(torch.float32)
    half = scale.to(torch.float16)
    is_off = ((half.to(torch.float32) - scale).abs() > _MOST_OF_SCALE * scale.abs()).squeeze(1)
    if bool(is_off.any()) and bool(centred_codes(part.kind, units[is_off]).any()):
        decoding(part.kind, "scales are too large or too small for 16 bits")
        return None
    heads = [half.view(torch.uint8)]
    if kind == "Q4_1":
        low = -scale * units[:, 4:8].contiguous().view(torch.float32)
        half_low = low.to(torch.float16)
        if bool(((half_low.to(torch.float32) - low).abs() > _MOST_OF_STEP * scale.abs()).any()):
            decoding(part.kind, "zero points are too large or too small for 16 bits")
            return None
        heads.append(half_low.view(torch.uint8))
    codes = units[:, unit.num_bytes - unit.num_values * (8 if kind == "Q8_0" else 4) // 8 :]
    return StoredRows(_blocks(kind, heads, codes, unit.num_values).view(len(part), -1), kind)


def _blocks(kind: str, heads: list[Tensor], codes: Tensor, num_values: int) -> Tensor:
    """heads: [units, 2] uint8 each, the same for all blocks of a unit."""
    num = num_values // _BLOCK
    blocks = torch.empty(len(codes), num, UNITS[kind].num_bytes, dtype=torch.uint8)
    for index, head in enumerate(heads):
        blocks[:, :, 2 * index : 2 * index + 2] = head.view(-1, 1, 2)
    begin = 2 * len(heads)
    if kind == "Q8_0":
        blocks[:, :, begin:] = codes.view(-1, num, _BLOCK)
    else:
        nibbles = neighbours(codes).view(-1, num, 2, _BLOCK // 2)
        blocks[:, :, begin:] = nibbles[:, :, 0] | nibbles[:, :, 1] << 4
    return blocks
