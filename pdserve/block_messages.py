"""What a worker says of its KV blocks: how many are in which state, and which are prefix hits."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockEvents:
    """Changes of the worker's prefix cache: blocks of these hashes became hits, or are gone.

    whole  forget what was told before: this begins the whole set, and the next messages go on with it
    """

    whole: bool
    stored: tuple[bytes, ...]
    removed: tuple[bytes, ...]
