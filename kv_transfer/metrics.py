"""What the transfer owner counts; the worker copies it into Prometheus."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from pdserve.errors import (
    DeadlineExceeded,
    Draining,
    HandedBack,
    InvalidRequest,
    PdserveError,
    RequestCancelled,
    Revoked,
    Unauthenticated,
)

K = TypeVar("K")

_NO_FAULTS = (RequestCancelled, DeadlineExceeded, Revoked, Draining, HandedBack)
"""What ends a lease though everything works: also a request that is complete with its first token."""


@dataclass(slots=True)
class TransferMetrics:
    """Written by the transfer owner only; another thread may read any one value at any time.

    received_s     seconds between the first pull and the last byte, summed over handed-off leases
    …_leases       each one that was opened is open, or has ended in one of four ways
    stale          frames of a dead lease or generation, by the sender's worker id and the kind of frame
    corrupt        pieces with a wrong checksum, by the sender's worker id
    lease_states   open leases by state, as of the last look at the time
    fell_back      transports that failed, so that a link took the next one, by peer
    pushed_out     strangers in their handshake who had to make room for later ones
    malformed      links ended because of a frame that can't be, by peer
    unproven       links ended because the other side didn't prove who it is, by the setting that asks for the proof
    unknown        frames of a later version: of a "kind" that isn't known, or with a "field" that isn't
    """

    sent_bytes: int = 0
    sent_pieces: int = 0
    received_bytes: int = 0
    received_pieces: int = 0
    received_s: float = 0.0
    opened_leases: int = 0
    confirmed_leases: int = 0
    handed_off_leases: int = 0
    failed_leases: int = 0
    aborted_leases: int = 0
    open_leases: int = 0
    links_up: int = 0
    links_opened: int = 0
    links_lost: int = 0
    pushed_out: int = 0
    stale: dict[tuple[str, str], int] = field(default_factory=dict)
    corrupt: dict[str, int] = field(default_factory=dict)
    fell_back: dict[str, int] = field(default_factory=dict)
    malformed: dict[str, int] = field(default_factory=dict)
    unproven: dict[str, int] = field(default_factory=dict)
    unknown: dict[str, int] = field(default_factory=dict)
    lease_states: tuple[tuple[str, int], ...] = ()

    @property
    def leases_add_up(self) -> bool:
        """Whether every lease is accounted for. O(1); between two turns only."""
        num_ended = self.confirmed_leases + self.handed_off_leases + self.failed_leases + self.aborted_leases
        return self.opened_leases == self.open_leases + num_ended

    def link_ended(self, error: PdserveError, peer: str) -> None:
        """A link has ended because of what came over it."""
        if isinstance(error, InvalidRequest):
            count(self.malformed, peer)
        elif isinstance(error, Unauthenticated):
            count(self.unproven, str(error.fields.get("field")))

    def lease_ended(self, error: PdserveError) -> bool:
        """A lease has ended without a hand-off. Returns whether that is a failure."""
        if isinstance(error, _NO_FAULTS):
            self.aborted_leases += 1
            return False
        self.failed_leases += 1
        return True


class DeviceCounts(NamedTuple):
    """What links have of the worker's device at this moment; freed communicators: in all."""

    num_communicators: int = 0
    num_freed_communicators: int = 0
    num_mapped_pools: int = 0
    num_pending_reads: int = 0
    staging_bytes: int = 0
    num_staging_copies: int = 0


def count(by: dict[K, int], key: K) -> None:
    """One more of these."""
    by[key] = by.get(key, 0) + 1
