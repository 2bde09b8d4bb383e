"""Memory for packed weights: one matrix behind the other on huge pages, in the order in which a step reads them.

A small matrix in a mapping of its own lies on small pages, of which a product looks up one every 64 lines; and what a
kernel fetches behind the end of a matrix is the beginning of the next one here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdserve.kv_memory import private_memory

_CHUNK_BYTES = 64 << 20  # only what is written to takes memory
_ALIGNMENT = 64


class WeightMemory:
    """Of one model, for the thread that loads it. A chunk lives as long as one of the tensors in it."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def place(self, weight: Tensor) -> Tensor:
        """A contiguous copy."""
        num_bytes = weight.numel() * weight.itemsize
        with torch.inference_mode():  # who else has a part of the chunk may be in it or not
            if num_bytes > len(self._free):
                self._free = torch.frombuffer(private_memory(max(num_bytes, _CHUNK_BYTES)), dtype=torch.uint8)
            placed = self._free[:num_bytes]
            self._free = self._free[-(-num_bytes // _ALIGNMENT) * _ALIGNMENT :]
            return placed.view(weight.dtype).view(weight.shape).copy_(weight)
