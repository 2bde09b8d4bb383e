"""Where D reads P's pool itself: every byte once, in few calls, leases in turns, a bounded amount a turn."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.frames import Frame
from kv_transfer.intake import Intake
from kv_transfer.lease import ReceiveLease
from kv_transfer.metrics import TransferMetrics
from kv_transfer.patience import Patience
from kv_transfer.pieces import BlockPieces
from kv_transfer.transports.port import RemoteRead
from pdserve.ids import Epoch, WorkerRef
from pdserve.kv_memory import ByteSpan, HostMemory
from tests.support.virtual_clock import VirtualClock

P = WorkerRef("p", Epoch(1, 1))
NUM_BLOCKS = 24


class _Port:
    """A link whose reads are done at once."""

    peer = P
    checksum = None
    reads_itself = True
    is_posted = False
    pull_room = 1

    def __init__(self) -> None:
        self.calls: list[Sequence[RemoteRead]] = []

    def send(self, frame: Frame) -> None:
        raise AssertionError(frame)

    def post_receive(self, tag: int, into: ByteSpan) -> None:
        raise AssertionError(tag, into)

    def divert(self, tag: int) -> bool:
        raise AssertionError(tag)

    def read_remote(self, tag: int, reads: Sequence[RemoteRead]) -> bool:
        assert tag > 0 and reads
        self.calls.append(reads)
        return True


def _intake(port: _Port, pieces: BlockPieces, window_bytes: int) -> Intake:
    pool = HostMemory(NUM_BLOCKS * pieces.block_bytes)
    return Intake(
        port=port,
        pool=pool,
        pieces=pieces,
        window_bytes=window_bytes,
        patience=Patience(lease_s=5.0),
        clock=VirtualClock(),
        metrics=TransferMetrics(),
    )


def _offered(lease_id: int, ours: Sequence[int], theirs: Sequence[int], pieces: BlockPieces) -> ReceiveLease:
    return ReceiveLease(
        lease_id=lease_id,
        source=P,
        num_expected=len(ours),
        num_skip=0,
        block_ids=tuple(ours),
        progress_s=0.0,
        pieces=bytearray(len(ours) * pieces.pieces_per_block),
        upto=len(ours),
        remote_ids=list(theirs),
    )


@given(
    st.integers(1, 40),
    st.integers(1, 60),
    st.integers(1, 3),
    st.integers(0, 100),
    st.randoms(use_true_random=False),
)
def test_every_byte_is_read_once_and_a_turn_is_bounded(
    block_bytes: int, piece_bytes: int, num_leases: int, more_bytes: int, draw: random.Random
) -> None:
    pieces = BlockPieces(block_bytes, piece_bytes)
    port = _Port()
    intake = _intake(port, pieces, pieces.largest + more_bytes)
    ours, theirs = draw.sample(range(NUM_BLOCKS), NUM_BLOCKS), draw.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    leases = [_offered(n + 1, ours[n::num_leases], theirs[n::num_leases], pieces) for n in range(num_leases)]
    for lease in leases:
        intake.want(lease)
    want = {
        theirs_at * block_bytes + n: ours_at * block_bytes + n
        for ours_at, theirs_at in zip(ours, theirs)
        for n in range(block_bytes)
    }
    while intake.has_work:
        port.calls.clear()
        intake.turn()
        intake.take_grown()
        assert sum(num_bytes for reads in port.calls for _, _, num_bytes in reads) <= max(
            piece_bytes, pieces.largest
        )
        for start, into, num_bytes in (read for reads in port.calls for read in reads):
            for n in range(num_bytes):
                assert want.pop(start + n) == into + n
    assert not want
    assert all(lease.is_filled and lease.num_full_blocks == lease.num_expected for lease in leases)


def test_what_a_turn_reads_of_a_lease_is_one_call_and_leases_share_the_turn() -> None:
    pieces = BlockPieces(256, 256 * 8)
    port = _Port()
    intake = _intake(port, pieces, 1 << 20)
    one, other = (
        _offered(lease_id, range(first, first + 12), range(12), pieces)
        for lease_id, first in ((1, 0), (2, 12))
    )
    intake.want(one)
    intake.turn()
    assert [len(reads) for reads in port.calls] == [8]
    intake.want(other)
    port.calls.clear()
    intake.turn()
    assert [len(reads) for reads in port.calls] == [4, 4]
    assert one.is_filled and other.num_written == 4
