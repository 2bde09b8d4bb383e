"""Which prefix blocks one worker holds: told by its block events, or else predicted from what it was sent."""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from pdserve.block_messages import BlockEvents


class PrefixIndex:
    """Hashes of blocks that are hits there, at most as many as the worker has blocks. Event-loop thread only.

    Until the worker tells its own they are the most recently used of those that this router had it compute: blind to
    other routers' requests and to what the worker evicts otherwise, but a better hint than none.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._hashes: OrderedDict[bytes, None] = OrderedDict()
        self.is_told = False

    def __len__(self) -> int:
        return len(self._hashes)

    def holds_exactly(self, hashes: Iterable[bytes]) -> bool:
        """Whether these are the hashes that it knows; for tests and simulations."""
        return self._hashes.keys() == dict.fromkeys(hashes).keys()

    def holds(self, block_hash: bytes) -> bool:
        """Whether it knows this one."""
        return block_hash in self._hashes

    def num_hits(self, hashes: Sequence[bytes]) -> int:
        """How many leading blocks of a chain the worker holds, or probably holds.

        By bisection, since it is asked of many workers for each request: a block outlives those behind it, as a chain
        is forgotten from its end. What was held for a while may have lost one before it: then it may say too much.
        """
        held = self._hashes
        if not hashes or hashes[0] not in held:
            return 0
        return bisect.bisect_left(hashes, True, key=lambda block_hash: block_hash not in held)

    def sent(self, hashes: Sequence[bytes]) -> None:
        """The worker has computed, or been handed, these leading blocks of one sequence. Only before it tells."""
        for block_hash in reversed(hashes[: self._num_blocks]):  # a chain is forgotten from its end
            self._hashes[block_hash] = None
            self._hashes.move_to_end(block_hash)
        self._cut()

    def told(self, events: BlockEvents) -> None:
        """Take in what the worker says of its cache."""
        if events.whole:
            self.is_told = True
            self._hashes.clear()
        for block_hash in events.removed:
            self._hashes.pop(block_hash, None)
        self._hashes.update(dict.fromkeys(events.stored))
        self._cut()

    def _cut(self) -> None:
        while len(self._hashes) > self._num_blocks:
            self._hashes.popitem(last=False)
