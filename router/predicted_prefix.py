"""Which prefix blocks a worker without an event source probably holds: those that this router had it compute."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class PredictedPrefix:
    """The most recently used block hashes, as many as the worker has blocks. Event-loop thread only.

    Blind to other routers' requests and to what the worker evicts otherwise: a hint, as good as none is bad.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._hashes: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._hashes)

    def sent(self, hashes: Sequence[bytes]) -> None:
        """The worker has computed, or been handed, these leading blocks of one sequence."""
        for block_hash in reversed(hashes[: self._num_blocks]):  # a chain is forgotten from its end
            self._hashes[block_hash] = None
            self._hashes.move_to_end(block_hash)
        while len(self._hashes) > self._num_blocks:
            self._hashes.popitem(last=False)

    def num_hits(self, hashes: Sequence[bytes]) -> int:
        """How many leading blocks of a chain the worker probably holds."""
        hits = 0
        for block_hash in hashes:
            if block_hash not in self._hashes:
                break
            hits += 1
        return hits
