"""The block hash against its specification and its test vectors."""

from __future__ import annotations

from hashlib import blake2b

import pytest

from pdserve import blockhash

# (seed, salt, ids, block size, root, hashes): computed once; other implementations must agree.
VECTORS = [
    (b"", "", [], 4, "9a5f44931ce6fd270ad49456c8a24b39", []),
    (
        b"seed",
        "",
        [0, 1, 2, 3, 4, 5, 6, 7, 8],
        4,
        "ad7d3aa6e045097a50bee62cf0386096",
        ["db59966914cfc5682ee4852b0028773f", "49455b65988437e220acb547f61b7cf7"],
    ),
    (
        b"seed",
        "tenant-7",
        [0xFFFFFFFF, 1, 2, 49151],
        4,
        "2ec8a3c0ebbf0f8896a8e6b568ebae89",
        ["0f626bce02af7a97822afe6ce9e3a979"],
    ),
]


@pytest.mark.parametrize(("seed", "salt", "ids", "block_size", "root", "hashes"), VECTORS)
def test_vectors(
    seed: bytes, salt: str, ids: list[int], block_size: int, root: str, hashes: list[str]
) -> None:
    assert blockhash.root(seed, salt).hex() == root
    assert [h.hex() for h in blockhash.hash_blocks(ids, block_size, seed=seed, salt=salt)] == hashes


def test_bytes_by_hand() -> None:
    root = blake2b(b"\x02\x00\x00\x00ABsalt", digest_size=16, person=b"pdserve.root").digest()
    first = blake2b(
        root + b"\x01\x00\x00\x00\x00\x01\x00\x00", digest_size=16, person=b"pdserve.block"
    ).digest()
    second = blake2b(
        first + b"\x05\x00\x00\x00\x06\x00\x00\x00", digest_size=16, person=b"pdserve.block"
    ).digest()
    assert blockhash.hash_blocks([1, 256, 5, 6], 2, seed=b"AB", salt="salt") == [first, second]
    assert blockhash.chain(None, [1, 256], seed=b"AB", salt="salt") == first
    assert blockhash.chain(first, [5, 6], seed=b"AB", salt="salt") == second


def test_every_input_counts() -> None:
    base = blockhash.chain(None, [1, 2], seed=b"m", salt="s")
    others = [
        blockhash.chain(None, [2, 1], seed=b"m", salt="s"),
        blockhash.chain(None, [1, 2, 0], seed=b"m", salt="s"),
        blockhash.chain(None, [1, 2], seed=b"ms", salt=""),
        blockhash.chain(None, [1, 2], seed=b"m", salt=""),
        blockhash.chain(base, [1, 2], seed=b"m", salt="s"),
    ]
    assert len({base, *others}) == 6


def test_extend_goes_on_where_it_stopped() -> None:
    ids = list(range(23))
    hashes: list[bytes] = []
    for length in (3, 4, 5, 12, 13, 23):
        blockhash.extend(hashes, ids[:length], 4, seed=b"m")
        assert hashes == blockhash.hash_blocks(ids[:length], 4, seed=b"m")
