"""Weights in block formats, drawn: any bytes are a block, if its scales are usual numbers."""

from __future__ import annotations

import torch

from pdserve.engine.stored_matrix import StoredMatrix, StoredRows
from pdserve.modelstore.grouped_types import GROUPED, UNITS

#: where the 16-bit scales of a block lie
SCALES = {
    "Q8_0": (0,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
KINDS = list(SCALES)
GROUPED_KINDS = list(GROUPED)


def drawn_blocks(rows: int, width: int, kind: str, generator: torch.Generator) -> StoredMatrix:
    """Values of a few hundredths up to a few."""
    unit = UNITS[kind]
    blocks = torch.randint(
        0, 256, (rows * width // unit.num_values, unit.num_bytes), generator=generator, dtype=torch.uint8
    )
    if kind in GROUPED:
        scale = torch.rand(len(blocks), 1, generator=generator) * 0.02 + 0.001
        blocks[:, :4] = scale.view(torch.uint8)
        if "Z" in kind:
            zeros = torch.randint(0, 16 if "4" in kind else 256, (len(blocks), 1), generator=generator)
            blocks[:, 4:8] = zeros.to(torch.float32).view(torch.uint8)
        if kind.startswith("F8"):
            blocks[:, 4:] = torch.where(blocks[:, 4:] & 127 == 127, 0, blocks[:, 4:])  # no NaN
    for place in SCALES.get(kind, ()):
        scale = torch.rand(len(blocks), 1, generator=generator) * 0.02 + 0.001
        blocks[:, place : place + 2] = scale.to(torch.float16).view(torch.uint8)
    raw = blocks.view(rows, -1)
    return StoredMatrix([StoredRows(raw, kind)], width)
