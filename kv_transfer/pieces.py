"""How blocks are cut into pieces: runs of bytes inside one block, equal but for the last of a block."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from kv_transfer.frames import MAX_PIECE_BYTES


@dataclass(frozen=True)
class BlockPieces:
    """D's choice alone: P serves any run inside an offered block."""

    block_bytes: int
    piece_bytes: int

    def __post_init__(self) -> None:
        if self.block_bytes < 1 or not 1 <= self.piece_bytes <= MAX_PIECE_BYTES:
            raise ValueError(f"want block_bytes >= 1 and 1 <= piece_bytes <= {MAX_PIECE_BYTES}, got {self}")

    @cached_property
    def pieces_per_block(self) -> int:
        return -(-self.block_bytes // self.piece_bytes)

    @cached_property
    def largest(self) -> int:
        """Bytes of the largest piece."""
        return min(self.piece_bytes, self.block_bytes)

    @cached_property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """(offset, length) of each piece of a block."""
        return tuple(
            (offset, min(self.piece_bytes, self.block_bytes - offset))
            for offset in range(0, self.block_bytes, self.piece_bytes)
        )

    def span(self, piece: int) -> tuple[int, int, int]:
        """(block, offset, length) of a piece; the block counted from the first expected one."""
        block, part = divmod(piece, self.pieces_per_block)
        return block, *self.parts[part]
