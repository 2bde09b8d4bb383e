"""Reads of P's pool that are neighbours in both pools are one copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kv_transfer.transports.port import RemoteRead


def joined(reads: Sequence[RemoteRead]) -> Iterator[RemoteRead]:
    """As few as they can be, in their order. At least one read."""
    begin, target, num_bytes = reads[0][0], reads[0][1], 0
    for start, into, length in reads:
        if start != begin + num_bytes or into != target + num_bytes:
            yield begin, target, num_bytes
            begin, target, num_bytes = start, into, 0
        num_bytes += length
    yield begin, target, num_bytes
