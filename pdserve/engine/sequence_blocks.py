"""What a sequence does with the block pool: reserve with prefix hits, grow, publish, release."""

from __future__ import annotations

from pdserve import blockhash
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.sequence import Sequence


class SequenceBlocks:
    """Moves blocks between the pool and block tables. Engine owner only."""

    def __init__(self, pool: BlockPool, cache_seed: bytes, *, prefix_cache: bool) -> None:
        self.pool = pool
        self.prefix_cache = prefix_cache
        self._seed = cache_seed

    def num_for(self, num_tokens: int) -> int:
        """Blocks that hold so many positions."""
        return -(-num_tokens // self.pool.block_size)

    def find_hits(self, seq: Sequence, max_blocks: int) -> list[int]:
        """The sequence's leading full blocks that are in the pool, at most max_blocks; not pinned."""
        if not (self.prefix_cache and seq.takes_hits):
            return []
        self._hash(seq)
        return self.pool.match(seq.block_hashes[:max_blocks])

    def find_hits_for_logits(self, seq: Sequence) -> list[int]:
        """As find_hits, but leaving at least one token to compute, in a block of its own."""
        return self.find_hits(seq, (len(seq.ids) - 1) // self.pool.block_size)

    def reserve(self, seq: Sequence, num_positions: int, *, num_spare: int = 0) -> bool:
        """Fill an empty block table for num_positions: pin its hits, allocate the rest, all or nothing.

        num_spare  blocks that must still be available afterwards
        """
        hits = self.find_hits_for_logits(seq)
        num_new = self.num_for(num_positions) - len(hits)
        if not self.pool.fits(hits, num_new + num_spare):
            return False
        self.pool.pin(hits)
        new = self.pool.allocate(num_new)
        assert new is not None, "fits() said yes"
        seq.block_table = [*hits, *new]
        seq.num_computed = len(hits) * self.pool.block_size
        seq.num_published = len(hits)
        return True

    def fits(self, seq: Sequence, num_positions: int, *, num_spare: int = 0) -> bool:
        """Whether `reserve` would succeed now."""
        hits = self.find_hits_for_logits(seq)
        return self.pool.fits(hits, self.num_for(num_positions) - len(hits) + num_spare)

    def is_short(self, seq: Sequence, num_unknown: int = 0) -> bool:
        """Whether the next position to compute, behind so many that are being computed, has no block yet."""
        return len(seq.block_table) * self.pool.block_size < len(seq.ids) + num_unknown

    def grow(self, seq: Sequence) -> bool:
        """One block more; False if none is available."""
        new = self.pool.allocate(1)
        if new is None:
            return False
        seq.block_table += new
        return True

    def publish(self, seq: Sequence) -> None:
        """Put the blocks that are full and computed into the prefix cache; each is looked at once."""
        num_full = seq.num_computed // self.pool.block_size
        if not (self.prefix_cache and seq.may_be_cached) or num_full <= seq.num_published:
            return
        self._hash(seq)
        for index in range(seq.num_published, num_full):
            self.pool.publish(seq.block_table[index], seq.block_hashes[index])
        seq.num_published = num_full

    def release(self, seq: Sequence, *, hold_until_s: float | None = None) -> None:
        """Give the whole block table back.

        If its KV is in doubt, all of its blocks are forgotten, hits too: one of them may be what spoiled it, and
        would spoil every later request that starts so.
        """
        if not seq.may_be_cached:
            self.pool.forget(seq.block_table)
        self.pool.release(seq.block_table, hold_until_s=hold_until_s)
        seq.block_table = []
        seq.num_computed = 0
        seq.num_published = 0

    def _hash(self, seq: Sequence) -> None:
        """Make seq.block_hashes cover all full blocks of its ids."""
        blockhash.extend(
            seq.block_hashes, seq.ids, self.pool.block_size, seed=self._seed, salt=seq.cache_salt
        )
