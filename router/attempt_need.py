"""What one attempt asks for, and how much of it a worker holds already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pdserve.blockhash import hash_blocks
from pdserve.ids import WorkerRef
from router.identity import ModelIdentity
from router.member import Member


@dataclass(slots=True, kw_only=True, eq=False)
class Need:
    """What one attempt asks for.

    identity    the model that the ids are of
    num_tokens  ids of the attempt; max_total_tokens: prompt + max_tokens, what the window must hold
    avoid       (prefill id or "", decode id) -> how often this request failed there
    only        such a pair that alone may be taken
    prefer      such a pair that is taken if it is possible at all (later choices of one request)
    kept_on     a prefill worker that may still hold the blocks of an earlier attempt, and how many tokens of them
    takes_hits  False: all of it is computed, cached or not (prompt logprobs)
    """

    identity: ModelIdentity
    token_ids: Sequence[int]
    max_total_tokens: int
    cache_salt: str = ""
    avoid: dict[tuple[str, str], int] = field(default_factory=dict)
    only: tuple[str, str] | None = None
    prefer: tuple[str, str] | None = None
    kept_on: tuple[WorkerRef, int] | None = None
    takes_hits: bool = True
    _hashes: dict[tuple[bytes, int], list[bytes]] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def hashes(self, member: Member) -> list[bytes]:
        """Of its full blocks, as this worker counts them."""
        hello = member.hello
        key = (hello.cache_seed, hello.block_size)
        if key not in self._hashes:
            self._hashes[key] = hash_blocks(
                self.token_ids, hello.block_size, seed=hello.cache_seed, salt=self.cache_salt
            )
        return self._hashes[key]

    def num_cached_tokens(self, member: Member) -> int:
        """Leading tokens that this worker holds as far as is known; the last one is always computed."""
        known = member.cache
        if not len(known):
            return 0
        block_size = member.hello.block_size
        return min(known.num_hits(self.hashes(member)), (self.num_tokens - 1) // block_size) * block_size

    def num_uncached_tokens(self, member: Member) -> int:
        """What this worker would have to compute: at least one token."""
        if not self.takes_hits:
            return self.num_tokens
        cached = self.num_cached_tokens(member)
        if self.kept_on is not None and self.kept_on[0] == member.ref:
            cached = max(cached, min(self.kept_on[1], self.num_tokens - 1))
        return self.num_tokens - cached
