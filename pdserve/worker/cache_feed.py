"""What the prefix cache holds, told to every router that knows block events (wire 1.2).

They go out when their session has nothing else to send, so they never delay tokens. A hash is told as it stands when
its turn comes; for a router that lags too far behind all begins again, so nothing here grows without bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pdserve.block_messages import BlockEvents

_HASHES_PER_MESSAGE = 1024  # 16 KiB: what a token may have to wait for
_MAX_REMOVED = 1 << 16

Source = Callable[[], BlockEvents | None]


class CacheFeed:
    """The hashes that are hits now, and the routers that are told of them. Loop only.

    max_removed  removed hashes that one router may have to be told of, before it is told the whole set instead
    """

    def __init__(self, max_removed: int = _MAX_REMOVED) -> None:
        self._max_removed = max_removed
        self._hits: dict[bytes, None] = {}
        self._readers: dict[int, _Reader] = {}

    def change(self, changes: Iterable[tuple[bool, bytes]]) -> None:
        """Take in changes in order: (True, hash) = became a hit, (False, hash) = is gone."""
        changes = tuple(changes)
        for is_hit, block_hash in changes:
            if is_hit:
                self._hits[block_hash] = None
            else:
                self._hits.pop(block_hash, None)
        for reader in self._readers.values():
            reader.change(changes)
            if reader.num_removed > self._max_removed:
                reader.begin(self._hits)
            reader.wake()

    def open(self, session_id: int, when_idle: Callable[[Source], Callable[[], None]]) -> None:
        """Tell this router everything, and every change until `close`. when_idle: of its session."""
        reader = _Reader()
        reader.begin(self._hits)
        reader.wake = when_idle(reader.take)
        self._readers[session_id] = reader

    def close(self, session_id: int) -> None:
        """The session has ended; idempotent."""
        self._readers.pop(session_id, None)


class _Reader:
    """What one router is still to be told; no hash stands in both sets.

    Removed ones go first, so that a router never holds more hashes than this worker has blocks.
    """

    def __init__(self) -> None:
        self.wake: Callable[[], None] = lambda: None
        self._whole = False
        self._stored: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}

    @property
    def num_removed(self) -> int:
        return len(self._removed)

    def begin(self, hits: dict[bytes, None]) -> None:
        """Tell the whole set, from an empty one on."""
        self._whole, self._stored, self._removed = True, hits.copy(), {}

    def change(self, changes: tuple[tuple[bool, bytes], ...]) -> None:
        for is_hit, block_hash in changes:
            now, before = (self._stored, self._removed) if is_hit else (self._removed, self._stored)
            before.pop(block_hash, None)
            now[block_hash] = None

    def take(self) -> BlockEvents | None:
        """The next message, or None when the router knows everything."""
        if not (self._whole or self._stored or self._removed):
            return None
        whole, self._whole = self._whole, False
        removed = _take_newest(self._removed, _HASHES_PER_MESSAGE)
        stored = _take_newest(self._stored, _HASHES_PER_MESSAGE - len(removed))
        return BlockEvents(whole=whole, stored=stored, removed=removed)


def _take_newest(hashes: dict[bytes, None], most: int) -> tuple[bytes, ...]:
    return tuple(hashes.popitem()[0] for _ in range(min(most, len(hashes))))
