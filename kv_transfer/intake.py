"""How a decode worker gets the bytes of offered blocks: by PULL and DATA, or by reading P's pool itself.

Sizes and destinations come from D's own grant and layout, never from the wire: a piece is known by the tag that D
gave its asking, and each tag is good for one arrival. A piece counts when its checksum is right; it is fetched once
more if it was wrong.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

import structlog

from kv_transfer.frames import MAX_PULLED_PIECES, Data, Frame, Pull, PulledPiece
from kv_transfer.lease import ASKED, UNASKED, WRITTEN, ReceiveLease
from kv_transfer.metrics import TransferMetrics, count
from kv_transfer.patience import Patience
from kv_transfer.pieces import BlockPieces
from kv_transfer.transports.port import RemoteRead
from pdserve.clock import Clock
from pdserve.errors import InvalidRequest, InvariantViolated, KvCorrupt, WorkerLost
from pdserve.ids import WorkerRef
from pdserve.kv_memory import ByteSpan, KvMemory

_MAX_OUTSTANDING = 1024
"""Pieces asked for and not yet received on a link, besides the window in bytes."""

log = structlog.get_logger()


class IntakePort(Protocol):
    """What the intake needs of its link."""

    @property
    def peer(self) -> WorkerRef: ...
    @property
    def checksum(self) -> str | None: ...
    @property
    def reads_itself(self) -> bool: ...
    @property
    def is_posted(self) -> bool: ...
    @property
    def pull_room(self) -> int: ...
    def send(self, frame: Frame) -> None: ...
    def post_receive(self, tag: int, into: ByteSpan) -> None: ...
    def divert(self, tag: int) -> bool: ...
    def read_remote(self, tag: int, reads: list[RemoteRead]) -> bool: ...


@dataclass(slots=True, eq=False)
class _Asked:
    """One asking: a piece of a lease or, where D reads itself, a run of them."""

    lease: ReceiveLease
    pieces: range
    num_bytes: int


class Intake:
    """The pulls of all leases of one link, leases in rotation. Transfer owner only."""

    def __init__(
        self,
        *,
        port: IntakePort,
        pool: KvMemory,
        pieces: BlockPieces,
        window_bytes: int,
        patience: Patience,
        clock: Clock,
        metrics: TransferMetrics,
    ) -> None:
        self.pieces = pieces
        self._patience = patience
        self._port = port
        self._pool = pool
        self._window_bytes = window_bytes
        self._clock = clock
        self._metrics = metrics
        self._rotation: deque[ReceiveLease] = deque()
        self._asked: dict[int, _Asked] = {}
        self._asked_bytes = 0
        self._next_tag = 1
        self._arriving: set[int] = set()
        self._grown: dict[int, ReceiveLease] = {}
        self._quarantined: dict[int, int] = {}
        self._orphans: dict[int, int] = {}
        self._released: list[int] = []

    def want(self, lease: ReceiveLease) -> None:
        """The lease has blocks to fill, and pieces of it may be asked for."""
        if not lease.is_in_rotation:
            lease.is_in_rotation = True
            self._rotation.append(lease)

    # --- asking

    @property
    def num_asked(self) -> int:
        """Pieces asked for and not received, of all leases."""
        return len(self._asked)

    @property
    def has_work(self) -> bool:
        """Whether a turn could do something now."""
        if self._released or self._grown:
            return True
        return bool(self._rotation) and self._has_room() and self._port.pull_room > 0

    def turn(self) -> list[ReceiveLease]:
        """Ask for all that the window allows; or, where D reads itself, read about what one piece may hold.

        returns  the leases of which pieces were read at once
        """
        if self._port.reads_itself:
            return self._read()
        self._pull()
        return []

    def _pull(self) -> None:
        now_s = self._clock.now_s()
        asked: dict[int, list[PulledPiece]] = {}
        num_asked, room = 0, min(MAX_PULLED_PIECES, self._port.pull_room)
        while num_asked < room and (found := self._next(1)) is not None:
            lease, pieces_found = found
            block, offset, num_bytes = self.pieces.span(pieces_found.start)
            tag = self._ask(lease, pieces_found, num_bytes, now_s)
            pulled = PulledPiece(tag, lease.num_skip + block, offset, num_bytes)
            asked.setdefault(lease.lease_id, []).append(pulled)
            num_asked += 1
        for lease_id, pieces in asked.items():
            if self._port.is_posted:
                for pulled in pieces:
                    self._port.post_receive(pulled.tag, self._into(self._asked[pulled.tag]))
            self._port.send(Pull(lease_id, tuple(pieces)))

    def _read(self) -> list[ReceiveLease]:
        """First all asking, then all copies, then all notes: in between, copies would empty the CPU's caches."""
        now_s = self._clock.now_s()
        left = self.pieces.piece_bytes // self.pieces.largest
        share = max(1, left // max(1, len(self._rotation)))
        runs: list[tuple[int, list[RemoteRead]]] = []
        while left and (found := self._next(min(share, left))) is not None:
            lease, run = found
            reads = self._reads(lease, run)
            runs.append((self._ask(lease, run, sum(read[2] for read in reads), now_s), reads))
            left -= len(run)
        done: list[int] = []
        for index, (tag, reads) in enumerate(runs):
            try:
                if self._port.read_remote(tag, reads):
                    done.append(tag)
            except WorkerLost:
                for unread, _reads in runs[index + 1 :]:
                    self._forget(unread)  # nothing of them touches memory
                raise
        now_s = self._clock.now_s()
        return [self._written(self._forget(tag), now_s) for tag in done]

    def _reads(self, lease: ReceiveLease, run: range) -> list[RemoteRead]:
        """All pieces of the blocks that the run touches, cut to the run: much cheaper than one by one."""
        block_bytes, per_block, parts = (
            self.pieces.block_bytes,
            self.pieces.pieces_per_block,
            self.pieces.parts,
        )
        first, last = run.start // per_block, -(-run.stop // per_block)
        reads = [
            (theirs * block_bytes + offset, ours * block_bytes + offset, num_bytes)
            for theirs, ours in zip(lease.remote_ids[first:last], lease.block_ids[first:last], strict=True)
            for offset, num_bytes in parts
        ]
        return reads[run.start - first * per_block : run.stop - first * per_block]

    def _next(self, most: int) -> tuple[ReceiveLease, range] | None:
        """The run of at most so many pieces to ask for now, leases in rotation; None if there is none, or no room."""
        while self._rotation and self._has_room():
            lease = self._rotation.popleft()
            run = self._next_pieces(lease, max(1, min(most, self._room_bytes() // self.pieces.largest)))
            if run:
                self._rotation.append(lease)
                return lease, run
            lease.is_in_rotation = False
        return None

    def _has_room(self) -> bool:
        if len(self._asked) >= _MAX_OUTSTANDING:
            return False
        return self._asked_bytes == 0 or self._room_bytes() >= self.pieces.largest

    def _room_bytes(self) -> int:
        return self._window_bytes - self._asked_bytes

    def _next_pieces(self, lease: ReceiveLease, most: int) -> range:
        """Of this lease: first those that came wrong, then the next ones offered."""
        if lease.again:
            piece = lease.again.popleft()
            return range(piece, piece + 1)
        num_offered = (lease.upto - lease.num_skip) * self.pieces.pieces_per_block
        run = range(lease.next_piece, min(lease.next_piece + most, num_offered))
        lease.next_piece += len(run)
        return run

    def _ask(self, lease: ReceiveLease, run: range, num_bytes: int, now_s: float) -> int:
        """Note the asking, and give it a tag."""
        if lease.pieces.count(UNASKED, run.start, run.stop) != len(run):
            raise InvariantViolated("a piece asked for twice", lease_id=lease.lease_id, pieces=run)
        tag = self._next_tag
        self._next_tag += 1
        self._asked[tag] = _Asked(lease, run, num_bytes)
        self._asked_bytes += num_bytes
        lease.pieces[run.start : run.stop] = bytes((ASKED,)) * len(run)
        if lease.num_asked == lease.num_written:
            lease.progress_s = now_s
        lease.num_asked += len(run)
        if lease.first_pull_s is None:
            lease.first_pull_s = now_s
        return tag

    def _into(self, asked: _Asked) -> ByteSpan:
        """Where the piece asked for by a PULL goes."""
        block, offset, num_bytes = self.pieces.span(asked.pieces.start)
        return ByteSpan(asked.lease.block_ids[block] * self.pieces.block_bytes + offset, num_bytes)

    # --- arriving

    def place(self, data: Data, num_bytes: int) -> ByteSpan | None:
        """Where the payload of this DATA goes; None if nobody waits for it. Raises InvalidRequest on a wrong size."""
        asked = self._asked.get(data.tag)
        if asked is None or asked.lease.lease_id != data.lease_id:
            if num_bytes > self.pieces.largest:
                raise _wrong_size(want=self.pieces.largest, got=num_bytes)
            return None
        if asked.num_bytes != num_bytes:
            raise _wrong_size(want=asked.num_bytes, got=num_bytes)
        self._arriving.add(data.tag)
        return self._into(asked)

    def on_data(self, data: Data) -> ReceiveLease | KvCorrupt | None:
        """A payload is complete. returns: its lease; the error that ends it; None if nobody waited for it."""
        if data.tag not in self._arriving:
            return None
        self._arriving.remove(data.tag)
        asked = self._forget(data.tag)
        kind = self._port.checksum
        # None: of a piece that the host has never seen, over NCCL beside a staged stream.
        if kind is None or self._pool.checksum(kind, self._into(asked)) in (None, data.checksum):
            return self._written(asked, self._clock.now_s())
        lease, piece = asked.lease, asked.pieces.start
        count(self._metrics.corrupt, self._port.peer.id)
        log.warning(
            "piece.corrupt",
            peer=self._port.peer.id,
            lease_id=lease.lease_id,
            **lease.name.logged,
            piece=piece,
        )
        if piece in lease.retried:
            return KvCorrupt("a piece with a wrong checksum, twice", lease_id=lease.lease_id, piece=piece)
        lease.retried.add(piece)
        lease.pieces[piece] = UNASKED
        lease.num_asked -= 1
        lease.progress_s = self._clock.now_s()
        lease.again.append(piece)
        self.want(lease)
        return lease

    def is_orphan(self, tag: int) -> bool:
        """Whether the lease of this read or posted receive has ended while it was under way."""
        return tag in self._orphans

    def on_done(self, tag: int) -> ReceiveLease | None:
        """A read is done, or what couldn't be diverted is over; None if its lease has ended meanwhile."""
        lease_id = self._orphans.pop(tag, None)
        if lease_id is None:
            return self._written(self._forget(tag), self._clock.now_s())
        self._quarantined[lease_id] -= 1
        if self._quarantined[lease_id] == 0:
            del self._quarantined[lease_id]
            self._released.append(lease_id)
        return None

    def _forget(self, tag: int) -> _Asked:
        asked = self._asked.pop(tag)
        self._asked_bytes -= asked.num_bytes
        return asked

    def _written(self, asked: _Asked, now_s: float) -> ReceiveLease:
        lease, run = asked.lease, asked.pieces
        if lease.pieces.count(ASKED, run.start, run.stop) != len(run):
            raise InvariantViolated("a piece written twice", lease_id=lease.lease_id, pieces=run)
        lease.pieces[run.start : run.stop] = bytes((WRITTEN,)) * len(run)
        lease.num_written += len(run)
        lease.received_bytes += asked.num_bytes
        lease.last_data_s = lease.progress_s = now_s
        self._patience.pass_piece(now_s)
        self._metrics.received_bytes += asked.num_bytes
        self._metrics.received_pieces += len(run)
        num_full = self._num_filled(lease, run)
        if num_full:
            lease.num_full_blocks += num_full
            self._grown[lease.lease_id] = lease
        return lease

    def _num_filled(self, lease: ReceiveLease, run: range) -> int:
        """Blocks of which this run, just written, was the last that was missing."""
        per_block = self.pieces.pieces_per_block
        if per_block == 1:
            return len(run)
        return sum(
            lease.pieces.count(WRITTEN, begin, begin + per_block) == per_block
            for begin in range(run.start // per_block * per_block, run.stop, per_block)
        )

    def take_grown(self) -> list[ReceiveLease]:
        """Leases that got a whole block since the last call."""
        grown, self._grown = list(self._grown.values()), {}
        return grown

    # --- the end of a lease

    def end(self, lease: ReceiveLease) -> bool:
        """Forget the lease: nothing that the channel begins from now on touches its blocks.

        returns  True if a read or receive under way still may (quarantine); `take_released` names the lease later
        """
        if lease.is_in_rotation:
            self._rotation.remove(lease)
            lease.is_in_rotation = False
        for tag in [tag for tag, asked in self._asked.items() if asked.lease is lease]:
            self._forget(tag)
            self._arriving.discard(tag)
            if not self._port.divert(tag):
                self._orphans[tag] = lease.lease_id
                self._quarantined[lease.lease_id] = self._quarantined.get(lease.lease_id, 0) + 1
        return lease.lease_id in self._quarantined

    def take_released(self) -> list[int]:
        """Ended leases whose last read or receive under way is over."""
        released, self._released = self._released, []
        return released


def _wrong_size(*, want: int, got: int) -> InvalidRequest:
    return InvalidRequest("malformed frame", frame="DATA", field="payload_bytes", want=want, got=got)
