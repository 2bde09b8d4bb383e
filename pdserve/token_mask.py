"""Sets of token ids as bits, the form in which grammar libraries write them: token t is bit t % 32 of word t // 32."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

TokenMask = npt.NDArray[np.int32]
"""[ceil(vocabulary / 32)], or shorter: tokens behind its end are not in the set."""


def num_words(vocab_size: int) -> int:
    """int32 words of a mask."""
    return -(-vocab_size // 32)


def to_mask(token_ids: npt.ArrayLike, vocab_size: int) -> TokenMask:
    """The mask that allows these ids and no others."""
    bits = np.zeros(num_words(vocab_size) * 32, dtype=np.uint8)
    bits[np.asarray(token_ids, dtype=np.int64)] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)


def to_flags(mask: TokenMask, vocab_size: int) -> npt.NDArray[np.bool_]:
    """[vocabulary] bool: which ids are allowed. Ids behind the mask's end are not."""
    bits = np.unpackbits(mask.astype("<i4").view(np.uint8), bitorder="little", count=vocab_size)
    return bits.astype(np.bool_)


def allows(mask: TokenMask, token_id: int) -> bool:
    """Whether one id is allowed."""
    word, bit = divmod(token_id, 32)
    return word < len(mask) and bool(int(mask[word]) >> bit & 1)


def ids_of(mask: TokenMask) -> list[int]:
    """The tokens of a mask, ascending."""
    bits = np.unpackbits(mask.astype("<i4").view(np.uint8), bitorder="little")
    found: list[int] = np.flatnonzero(bits).tolist()
    return found
