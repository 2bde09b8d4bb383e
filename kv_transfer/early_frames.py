"""Frames about a lease of which the engine's word is still on its way to the transfer owner.

D's engine says ExpectLease to its transfer owner and Granted to its loop at the same time; the answer to Granted may
come back, by way of router and prefill worker, before a slow transfer owner has looked at its queue.
"""

from __future__ import annotations

from kv_transfer.frames import Commit, Kind, Ready, Withdraw

_MAX_LEASES = 256
_MAX_FRAMES = 64

News = Ready | Commit | Withdraw


class EarlyFrames:
    """Keeps such frames for a moment; after it their lease is unknown, and they are stale."""

    def __init__(self, *, hold_s: float) -> None:
        self._hold_s = hold_s
        self._kept: dict[int, tuple[float, list[News]]] = {}

    def keep(self, frame: News, now_s: float) -> None:
        """Over the bounds the oldest, or this one, is dropped: its lease will end by its time-out."""
        _until_s, frames = self._kept.setdefault(frame.lease_id, (now_s + self._hold_s, []))
        if len(frames) < _MAX_FRAMES:
            frames.append(frame)
        if len(self._kept) > _MAX_LEASES:
            del self._kept[next(iter(self._kept))]

    def take(self, lease_id: int) -> list[News]:
        """The frames of a lease that has become known, in order."""
        return self._kept.pop(lease_id, (0.0, []))[1]

    def expired(self, now_s: float) -> list[tuple[int, Kind]]:
        """(lease id, kind) of frames to be answered STALE: nobody announced their lease in time."""
        found: list[tuple[int, Kind]] = []
        for lease_id, (until_s, frames) in list(self._kept.items()):
            if now_s >= until_s:
                del self._kept[lease_id]
                if not any(isinstance(frame, Withdraw) for frame in frames):
                    found.append((lease_id, frames[0].kind))
        return found

    def next_due_s(self) -> float | None:
        """When the next one expires."""
        return min((until_s for until_s, _frames in self._kept.values()), default=None)
