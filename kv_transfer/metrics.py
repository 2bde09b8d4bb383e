"""What the transfer owner counts; the worker copies it into Prometheus."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class TransferMetrics:
    """Written by the transfer owner only; another thread may read any one value at any time.

    received_s     seconds between the first pull and the last byte, summed over handed-off leases
    stale, corrupt frames of a dead lease or generation, and pieces with a wrong checksum, by the sender's worker id
    fell_back      links that use the stream because the preferred transport failed, by peer
    pushed_out     strangers in their handshake who had to make room for later ones
    malformed      links ended because of a frame that can't be, by peer
    unknown        frames of a later version: of a "kind" that isn't known, or with a "field" that isn't
    """

    sent_bytes: int = 0
    sent_pieces: int = 0
    received_bytes: int = 0
    received_pieces: int = 0
    received_s: float = 0.0
    confirmed_leases: int = 0
    handed_off_leases: int = 0
    failed_leases: int = 0
    open_leases: int = 0
    links_up: int = 0
    links_opened: int = 0
    links_lost: int = 0
    pushed_out: int = 0
    stale: dict[str, int] = field(default_factory=dict)
    corrupt: dict[str, int] = field(default_factory=dict)
    fell_back: dict[str, int] = field(default_factory=dict)
    malformed: dict[str, int] = field(default_factory=dict)
    unknown: dict[str, int] = field(default_factory=dict)


def count(by_peer: dict[str, int], peer: str) -> None:
    """One more for this peer."""
    by_peer[peer] = by_peer.get(peer, 0) + 1
