"""The chained hash that names a full KV block: equal hashes mean equal tokens before and in it, on any process.

All hashes are BLAKE2b with a 16-byte digest, no key, and a personalisation (zero-padded to 16 bytes by BLAKE2b):

    root     = BLAKE2b-128("pdserve.root",  u32le(len(seed)) ‖ seed ‖ utf8(salt))
    hash 0   = BLAKE2b-128("pdserve.block", root       ‖ u32le(id 0)  ‖ u32le(id 1) ‖ …)
    hash k   = BLAKE2b-128("pdserve.block", hash k − 1 ‖ u32le of the ids of block k)

seed is the model's part (`ModelCard.cache_seed`): blocks of two models never meet. salt is a request's own wish to
share with equal salts only; "" shares with all that give none. The block size isn't an input: it shows in the
number of ids. Vectors: tests/unit/engine_core/test_blockhash.py.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

HASH_BYTES = 16


def root(seed: bytes, salt: str = "") -> bytes:
    """The parent of a chain's first block."""
    content = struct.pack("<I", len(seed)) + seed + salt.encode()
    return blake2b(content, digest_size=HASH_BYTES, person=b"pdserve.root").digest()


def child(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The hash of the block that holds token_ids behind the block (or root) named parent.

    token_ids  each in [0, 2**32)
    """
    content = parent + struct.pack(f"<{len(token_ids)}I", *token_ids)
    return blake2b(content, digest_size=HASH_BYTES, person=b"pdserve.block").digest()


def chain(parent: bytes | None, token_ids: Sequence[int], *, seed: bytes, salt: str = "") -> bytes:
    """The hash of one block; parent None for the first one of a sequence."""
    return child(root(seed, salt) if parent is None else parent, token_ids)


def hash_blocks(token_ids: Sequence[int], block_size: int, *, seed: bytes, salt: str = "") -> list[bytes]:
    """The hashes of all full blocks of a sequence, in order; what doesn't fill a block has none."""
    return extend([], token_ids, block_size, seed=seed, salt=salt)


def extend(
    hashes: list[bytes], token_ids: Sequence[int], block_size: int, *, seed: bytes, salt: str = ""
) -> list[bytes]:
    """Append to `hashes`, which are those of the first blocks of token_ids, what is missing; returns it."""
    parent = hashes[-1] if hashes else root(seed, salt)
    for begin in range(len(hashes) * block_size, len(token_ids) - block_size + 1, block_size):
        parent = child(parent, token_ids[begin : begin + block_size])
        hashes.append(parent)
    return hashes
