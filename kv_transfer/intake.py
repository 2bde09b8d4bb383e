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
from kv_transfer.pieces import BlockPieces
from kv_transfer.transports.port import RemoteRead
from pdserve.clock import Clock
from pdserve.errors import InvalidRequest, InvariantViolated, KvCorrupt
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
    def can_divert(self) -> bool: ...
    def send(self, frame: Frame) -> None: ...
    def post_receive(self, tag: int, into: ByteSpan) -> None: ...
    def divert(self) -> None: ...
    def read_remote(self, reads: list[RemoteRead]) -> bool: ...


@dataclass(slots=True, eq=False)
class _Asked:
    """One asking: which piece of which lease, and where it goes."""

    lease: ReceiveLease
    piece: int
    into: ByteSpan


class Intake:
    """The pulls of all leases of one link, leases in rotation. Transfer owner only."""

    def __init__(
        self,
        *,
        port: IntakePort,
        pool: KvMemory,
        pieces: BlockPieces,
        window_bytes: int,
        clock: Clock,
        metrics: TransferMetrics,
    ) -> None:
        self.pieces = pieces
        self._port = port
        self._pool = pool
        self._window_bytes = window_bytes
        self._clock = clock
        self._metrics = metrics
        self._rotation: deque[ReceiveLease] = deque()
        self._asked: dict[int, _Asked] = {}
        self._asked_bytes = 0
        self._next_tag = 1
        self._arriving: int | None = None
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
    def has_work(self) -> bool:
        """Whether a turn could do something now."""
        return bool(self._released or self._grown) or (bool(self._rotation) and self._has_room())

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
        num_asked = 0
        while num_asked < MAX_PULLED_PIECES and (found := self._next()) is not None:
            lease, piece = found
            block, offset, num_bytes = self.pieces.span(piece)
            into = ByteSpan(lease.block_ids[block] * self.pieces.block_bytes + offset, num_bytes)
            tag = self._ask(lease, piece, into, now_s)
            pulled = PulledPiece(tag, lease.num_skip + block, offset, num_bytes)
            asked.setdefault(lease.lease_id, []).append(pulled)
            num_asked += 1
        for lease_id, pieces in asked.items():
            if not self._port.can_divert:
                for pulled in pieces:
                    self._port.post_receive(pulled.tag, self._asked[pulled.tag].into)
            self._port.send(Pull(lease_id, tuple(pieces)))

    def _read(self) -> list[ReceiveLease]:
        """First all asking, then all copies, then all notes: in between, copies would empty the CPU's caches."""
        now_s, pieces = self._clock.now_s(), self.pieces
        reads: list[RemoteRead] = []
        left_bytes, largest, block_bytes = pieces.piece_bytes, pieces.largest, pieces.block_bytes
        while left_bytes >= largest and (found := self._next()) is not None:
            lease, piece = found
            block, offset, num_bytes = pieces.span(piece)
            into = ByteSpan(lease.block_ids[block] * block_bytes + offset, num_bytes)
            start = lease.remote_ids[block] * block_bytes + offset
            reads.append(RemoteRead(self._ask(lease, piece, into, now_s), start, into))
            left_bytes -= num_bytes
        if not reads or not self._port.read_remote(reads):
            return []
        now_s = self._clock.now_s()
        leases: dict[int, ReceiveLease] = {}
        for tag, _start, _into in reads:
            lease = self._written(self._forget(tag), now_s)
            leases[lease.lease_id] = lease
        return list(leases.values())

    def _next(self) -> tuple[ReceiveLease, int] | None:
        """The piece to ask for now, leases in rotation; None if there is none, or no room for one."""
        while self._rotation and self._has_room():
            lease = self._rotation.popleft()
            piece = self._next_piece(lease)
            if piece is not None:
                self._rotation.append(lease)
                return lease, piece
            lease.is_in_rotation = False
        return None

    def _has_room(self) -> bool:
        if len(self._asked) >= _MAX_OUTSTANDING:
            return False
        return self._asked_bytes == 0 or self._asked_bytes + self.pieces.largest <= self._window_bytes

    def _next_piece(self, lease: ReceiveLease) -> int | None:
        """Of this lease: first those that came wrong, then the next one offered."""
        if lease.again:
            return lease.again.popleft()
        num_offered = (lease.upto - lease.num_skip) * self.pieces.pieces_per_block
        if lease.next_piece >= num_offered:
            return None
        lease.next_piece += 1
        return lease.next_piece - 1

    def _ask(self, lease: ReceiveLease, piece: int, into: ByteSpan, now_s: float) -> int:
        """Note the asking, and give it a tag."""
        if lease.pieces[piece] != UNASKED:
            raise InvariantViolated("a piece asked for twice", lease_id=lease.lease_id, piece=piece)
        tag = self._next_tag
        self._next_tag += 1
        self._asked[tag] = _Asked(lease, piece, into)
        self._asked_bytes += into.num_bytes
        lease.pieces[piece] = ASKED
        if lease.num_asked == lease.num_written:
            lease.progress_s = now_s
        lease.num_asked += 1
        if lease.first_pull_s is None:
            lease.first_pull_s = now_s
        return tag

    # --- arriving

    def place(self, data: Data, num_bytes: int) -> ByteSpan | None:
        """Where the payload of this DATA goes; None if nobody waits for it. Raises InvalidRequest on a wrong size."""
        asked = self._asked.get(data.tag)
        if asked is None or asked.lease.lease_id != data.lease_id:
            self._arriving = None
            if num_bytes > self.pieces.largest:
                raise _wrong_size(want=self.pieces.largest, got=num_bytes)
            return None
        if asked.into.num_bytes != num_bytes:
            raise _wrong_size(want=asked.into.num_bytes, got=num_bytes)
        self._arriving = data.tag
        return asked.into

    def on_data(self, data: Data) -> ReceiveLease | KvCorrupt | None:
        """A payload is complete. returns: its lease; the error that ends it; None if nobody waited for it."""
        if self._arriving != data.tag:
            return None
        self._arriving = None
        asked = self._forget(data.tag)
        kind = self._port.checksum
        if kind is None or self._pool.checksum(kind, asked.into) == data.checksum:
            return self._written(asked, self._clock.now_s())
        lease, piece = asked.lease, asked.piece
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
        """A read is done, or a posted receive is over; None if its lease has ended meanwhile."""
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
        self._asked_bytes -= asked.into.num_bytes
        return asked

    def _written(self, asked: _Asked, now_s: float) -> ReceiveLease:
        lease = asked.lease
        if lease.pieces[asked.piece] != ASKED:
            raise InvariantViolated("a piece written twice", lease_id=lease.lease_id, piece=asked.piece)
        lease.pieces[asked.piece] = WRITTEN
        lease.num_written += 1
        lease.received_bytes += asked.into.num_bytes
        lease.last_data_s = lease.progress_s = now_s
        self._metrics.received_bytes += asked.into.num_bytes
        self._metrics.received_pieces += 1
        block = asked.piece // self.pieces.pieces_per_block
        lease.blocks_left[block] -= 1
        if lease.blocks_left[block] == 0:
            lease.num_full_blocks += 1
            self._grown[lease.lease_id] = lease
        return lease

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
            if not self._port.can_divert:
                self._orphans[tag] = lease.lease_id
                self._quarantined[lease.lease_id] = self._quarantined.get(lease.lease_id, 0) + 1
            elif self._arriving == tag:
                self._port.divert()
                self._arriving = None
        return lease.lease_id in self._quarantined

    def take_released(self) -> list[int]:
        """Ended leases whose last read or receive under way is over."""
        released, self._released = self._released, []
        return released


def _wrong_size(*, want: int, got: int) -> InvalidRequest:
    return InvalidRequest("malformed frame", frame="DATA", field="payload_bytes", want=want, got=got)
