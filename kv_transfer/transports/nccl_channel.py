"""A connection whose pieces go from device to device by NCCL, its frames over another connection.

It is that other connection, unchanged, until both ends are ranks of a communicator and use it. From then on it is
"posted" (port.py): DATA announces a piece whose bytes come by themselves, PULL waits until its receives stand.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from kv_transfer.frames import Data, Frame, Kind, Pull
from kv_transfer.framing import HEADER_BYTES, kind_of, parse_body, parse_header
from kv_transfer.transports.nccl_device import Membership, NcclDevice
from kv_transfer.transports.nccl_groups import Announced, Receives, Sends
from kv_transfer.transports.nccl_port import NCCL
from kv_transfer.transports.port import Channel, RemoteRead, Sharing, Sink
from pdserve.errors import InvariantViolated, PdserveError
from pdserve.kv_memory import ByteSpan


class ControlChannel(Channel, Protocol):
    """A channel that can carry frames alone. payloads_apart: set, no payload follows a DATA frame, either way."""

    payloads_apart: bool


class NcclChannel:
    """device: shared by all connections of the worker."""

    def __init__(self, control: ControlChannel, device: NcclDevice) -> None:
        self._control = control
        self._device = device
        self._member = Membership(device)
        self._receives: Receives | None = None
        self._sends: Sends | None = None
        self._failed: str | None = None
        self._is_closed = False
        self._over: deque[int] = deque()  # tags of receives that will not be written any longer
        self._gate = _Gate(self)

    @property
    def joining(self) -> Membership:
        return self._member

    @property
    def transport(self) -> str:
        return NCCL if self._member.is_used else self._control.transport

    @property
    def peer(self) -> str:
        return self._control.peer

    @property
    def reads_itself(self) -> bool:
        return self._control.reads_itself

    @property
    def can_detach(self) -> bool:
        return self._control.can_detach and not self._member.is_used

    @property
    def is_posted(self) -> bool:
        return self._member.is_used

    @property
    def pull_room(self) -> int:
        return self._control.pull_room

    @property
    def sharing(self) -> Sharing | None:
        return self._control.sharing

    @property
    def closed_reason(self) -> str | None:
        return self._failed or self._control.closed_reason

    @property
    def received_bytes(self) -> int:
        return self._control.received_bytes

    # --- sending

    @property
    def can_send_piece(self) -> bool:
        groups = self._groups()
        if groups is None:
            return self._control.can_send_piece
        return self.closed_reason is None and groups[1].is_free

    @property
    def num_unsent_pieces(self) -> int:
        groups = self._groups()
        return self._control.num_unsent_pieces if groups is None else groups[1].num_unsent

    def send(self, wire: bytes) -> None:
        groups = self._groups()
        if groups is None or kind_of(wire) is not Kind.PULL:
            self._control.send(wire)
            return
        pull = parse_body(parse_header(wire[:HEADER_BYTES]), wire[HEADER_BYTES:])
        assert isinstance(pull, Pull)
        groups[0].pull(wire, len(pull.pieces))

    def send_piece(self, wire: bytes, span: ByteSpan) -> None:
        groups = self._groups()
        if groups is None:
            self._control.send_piece(wire, span)
        elif self.closed_reason is None:
            groups[1].add(wire, span, span.num_bytes)

    def skip_piece(self, wire: bytes, num_bytes: int) -> None:
        groups = self._groups()
        if groups is None:
            self._control.skip_piece(wire, num_bytes)
        elif self.closed_reason is None:
            groups[1].add(wire, None, num_bytes)

    def detach_piece(self) -> None:
        if self._member.is_used:
            raise InvariantViolated("what a device sends can't be taken back", peer=self.peer)
        self._control.detach_piece()

    def flush(self) -> None:
        self._advance()
        self._control.flush()

    # --- receiving

    def post_receive(self, tag: int, into: ByteSpan) -> None:
        groups = self._groups()
        if groups is None:
            self._control.post_receive(tag, into)
        elif self._is_closed:
            self._over.append(tag)
        else:
            groups[0].post(tag, into)

    def divert(self, tag: int) -> bool:
        return not self._member.is_used and self._control.divert(tag)

    def read_remote(self, tag: int, reads: Sequence[RemoteRead]) -> bool:
        return self._control.read_remote(tag, reads)

    def receive(self, sink: Sink) -> bool:
        if self._is_closed:
            self._bury()
            self._control.receive(sink)
            while self._over:
                sink.on_done(self._over.popleft())
            return False
        self._advance()
        groups = self._groups()
        if groups is None:
            return self._control.receive(sink)
        piece = groups[0].take()
        if piece is not None:
            sink.place(*piece)
            sink.on_frame(piece.data, piece.generation)
            return True
        self._gate.inner = sink
        return self._control.receive(self._gate)

    def on_data(self, announced: Announced) -> None:
        """D: a piece is announced. Raises InvalidRequest."""
        assert self._receives is not None
        self._receives.announce(announced)

    def on_pull(self, pull: Pull) -> None:
        """P: D's receives stand."""
        assert self._sends is not None
        self._sends.on_pull(len(pull.pieces))

    # --- its groups

    def _groups(self) -> tuple[Receives, Sends] | None:
        """None while the other connection carries the pieces."""
        if not self._member.is_used:
            return None
        if self._receives is None or self._sends is None:
            assert self._member.comm is not None
            self._receives = Receives(self._device, self._member.comm)
            self._sends = Sends(self._device, self._member.comm)
            self._control.payloads_apart = True
        return self._receives, self._sends

    def _advance(self) -> None:
        groups = self._groups()
        if groups is None or self.closed_reason is not None or self._is_closed:
            return
        try:
            for group in groups:
                group.advance(self._control.send)
        except PdserveError as error:
            self._failed = str(error)

    # --- time and the end

    @property
    def is_idle(self) -> bool:
        if self._over or not self._control.is_idle:
            return False
        if self._receives is None or self._sends is None:
            return True
        return self._receives.is_empty and self._sends.num_unsent == 0

    def next_due_s(self) -> float | None:
        """When to look again; a device wakes nobody."""
        if self._is_closed:
            return None
        groups = self._groups()
        dues = [self._member.next_due_s(), *(group.next_due_s() for group in groups or ())]
        return min((due_s for due_s in dues if due_s is not None), default=None)

    def close(self, reason: str) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._control.close(reason)
        if self._receives is not None and self._sends is not None:
            self._over += self._receives.die()
            self._sends.die()
        self._member.leave()

    def _bury(self) -> None:
        """What a device might still have touched, it no longer does."""
        if self._receives is not None and self._sends is not None and self._member.is_gone:
            self._over += self._receives.bury()
            self._sends.bury()


class _Gate:
    """The link's sink, as the other connection sees it: it announces pieces that the channel delivers."""

    def __init__(self, channel: NcclChannel) -> None:
        self.inner: Sink
        self._channel = channel
        self._num_bytes = 0

    def place(self, data: Data, generation: int, num_bytes: int) -> ByteSpan | None:
        self._num_bytes = num_bytes
        return None

    def on_frame(self, frame: Frame, generation: int) -> None:
        if isinstance(frame, Data):
            self._channel.on_data(Announced(frame, generation, self._num_bytes))
            return
        if isinstance(frame, Pull):
            self._channel.on_pull(frame)
        self.inner.on_frame(frame, generation)

    def on_done(self, tag: int) -> None:
        self.inner.on_done(tag)

    def on_unknown(self, what: str) -> None:
        self.inner.on_unknown(what)
