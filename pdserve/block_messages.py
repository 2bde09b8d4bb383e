"""What a worker says of its KV blocks: how many are in which state, and which become or cease to be prefix hits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """The five block states, which add up to the pool."""

    free: int
    granted: int
    owned: int
    cached: int
    quarantined: int


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Blocks of these hashes became hits."""

    sequence: int
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks of these hashes are gone."""

    sequence: int
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class SnapshotPart:
    """A part of the whole set of hashes as of `sequence`; `first` empties the reader's set."""

    sequence: int
    hashes: tuple[bytes, ...]
    first: bool
    last: bool


CacheEvent = BlocksStored | BlocksRemoved | SnapshotPart
