"""A file in the address space: its bytes are read when they are looked at, from pages that all processes share."""

from __future__ import annotations

import mmap
from pathlib import Path

import torch
from torch import Tensor

from pdserve.modelstore.errors import BadModel


class MappedFile:
    """Nothing of it is this process's own memory. Its pages count as resident once read, until `release`."""

    def __init__(self, path: Path) -> None:
        """Raises BadModel if it is missing or empty."""
        try:
            with path.open("rb") as stream:
                # Copy-on-write, since torch wants a writable buffer. Nobody writes.
                self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        except FileNotFoundError:
            raise BadModel("the model folder lacks a file", file=str(path)) from None
        except ValueError:
            raise BadModel("a weights file is empty", file=str(path)) from None
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    @property
    def num_bytes(self) -> int:
        return len(self._map)

    def view(self, offset: int, num_bytes: int) -> Tensor:
        """[num_bytes] uint8, which keeps the mapping alive."""
        return self._bytes[offset : offset + num_bytes]

    def release(self, offset: int, num_bytes: int) -> None:
        """Give the pages of these bytes back. Views of them stay good: what is looked at again is read again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            begin = offset // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, begin, offset + num_bytes - begin)
