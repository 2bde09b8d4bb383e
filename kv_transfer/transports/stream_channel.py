"""One stream connection: frames over a non-blocking socket, payloads straight between socket and pool.

A Unix one may also pass P's pool to D, which then copies from it, without payloads: from its memfd (memfd_sharing.py),
or on a device (cuda_ipc.py).

Reading is one gathered call: the rest of the payload that arrives goes to where the sink placed it, and what follows
it to a small control buffer; so of each piece at most _CONTROL_READ_BYTES are copied. Writing is one gathered call of
control frames and the piece as it lies in the pool.
"""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kv_transfer.frames import MAX_PULLED_PIECES, Data
from kv_transfer.framing import HEADER_BYTES, MAX_BODY_BYTES, Header, parse_body, parse_header, unknown_in
from kv_transfer.transports.memfd_sharing import MemfdSharing
from kv_transfer.transports.port import RemoteRead, Sharing, Sink
from pdserve.errors import InvariantViolated
from pdserve.kv_memory import ByteSpan, KvMemory

MAX_QUEUED_BYTES = 8 << 20
"""Control frames that wait for the peer to read; over it the channel closes."""
_CONTROL_READ_BYTES = 4096
_BUFFER_BYTES = HEADER_BYTES + MAX_BODY_BYTES + _CONTROL_READ_BYTES
_MAX_FRAMES_PER_TURN = 64
_MAX_GATHERED = 64

Share = Callable[[Callable[[bytes], None]], Sharing]
"""Makes one end of a connection share memory: (what queues a frame) -> it."""


class Opening(Protocol):
    """A connection on its way (stream_dial.py)."""

    def turn(self) -> socket.socket | str | None:
        """The connected socket; why none could be had; None: not yet. Raises Unauthenticated: it isn't believed."""
        ...

    @property
    def transport(self) -> str: ...
    @property
    def address(self) -> str: ...
    def close(self) -> None: ...


class Watch(Protocol):
    """What a channel tells the network's selector."""

    def want_write(self, channel: StreamChannel, sock: socket.socket, *, wanted: bool) -> None: ...
    def drop(self, sock: socket.socket) -> None: ...


@dataclass(slots=True, eq=False)
class _Segment:
    """Bytes to be sent; is_pool: they lie in the KV pool; descriptor: one that goes beside them."""

    view: memoryview
    is_pool: bool = False
    descriptor: int | None = None


class StreamChannel:
    """is_readable and is_writable are set by the network's poll, and cleared when there is no more for now."""

    def __init__(self, watch: Watch, memory: KvMemory, share: Share | None = None) -> None:
        """share: in which way memory is passed, instead of by its memfd."""
        self.peer = ""
        self.sharing: Sharing | None = None
        self.joining = None
        self.payloads_apart = False
        self.closed_reason: str | None = None
        self.received_bytes = 0
        self.is_readable = False
        self.is_writable = True
        self._transport = ""
        self._watch = watch
        self._memory = memory
        self._share = share
        self._descriptors: MemfdSharing | None = None
        self._sock: socket.socket | None = None
        self._opening: Opening | None = None
        self._out: deque[_Segment] = deque()
        self._out_bytes = 0
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._low = 0
        self._high = 0
        self._header: Header | None = None
        self._data: Data | None = None
        self._rest: memoryview | None = None

    def start(self, sock: socket.socket, transport: str, peer: str) -> None:
        """Go over this connected socket from now on."""
        self._opening = None
        self._sock = sock
        self._transport = transport
        self.peer = peer
        if sock.family == socket.AF_UNIX and self._share is not None:
            self.sharing = self._share(self.send)
        elif sock.family == socket.AF_UNIX:
            self.sharing = self._descriptors = MemfdSharing(self._memory, self._send_with)
        self.is_readable = self.is_writable = True

    def open_by(self, opening: Opening, transport: str = "") -> None:
        """The connection is on its way. transport: what it will be, where that is known."""
        self._opening = opening
        self._transport = transport
        self.peer = opening.address

    @property
    def reads_itself(self) -> bool:
        return self.sharing is not None and self.sharing.is_read

    @property
    def can_detach(self) -> bool:
        return self._takes_back

    is_posted = False
    pull_room = MAX_PULLED_PIECES

    @property
    def _takes_back(self) -> bool:
        """Nothing goes on that this process doesn't do itself."""
        return self.sharing is None or not self.sharing.is_read or self.sharing.is_at_once

    @property
    def is_idle(self) -> bool:
        return self.sharing is None or self.sharing.is_idle

    @property
    def transport(self) -> str:
        return self.sharing.kind if self.sharing is not None and self.sharing.is_read else self._transport

    # --- sending

    @property
    def can_send_piece(self) -> bool:
        return self._sock is not None and not self._out

    def send(self, wire: bytes) -> None:
        if self.closed_reason is not None:
            return
        if self._out_bytes + len(wire) > MAX_QUEUED_BYTES:
            self._shut("the peer doesn't read")
            return
        self._queue(_Segment(memoryview(wire)))

    def _send_with(self, wire: bytes, descriptor: int | None) -> None:
        if self.closed_reason is None:
            self._queue(_Segment(memoryview(wire), descriptor=descriptor))

    @property
    def num_unsent_pieces(self) -> int:
        return 1 if any(segment.is_pool for segment in self._out) else 0

    def send_piece(self, wire: bytes, span: ByteSpan) -> None:
        if self.closed_reason is not None:
            return
        self._queue(_Segment(memoryview(wire)))
        self._queue(_Segment(self._memory.view(span), is_pool=True))

    def skip_piece(self, wire: bytes, num_bytes: int) -> None:
        raise InvariantViolated("a stream has no posted receives", num_bytes=num_bytes)

    def _queue(self, segment: _Segment) -> None:
        self._out.append(segment)
        self._out_bytes += len(segment.view)

    def detach_piece(self) -> None:
        for segment in self._out:
            if segment.is_pool:
                segment.view = memoryview(bytes(segment.view))
                segment.is_pool = False

    def flush(self) -> None:
        if self._sock is None or not self._out:
            return
        while self._out and self.is_writable:
            segments = [segment for segment, _ in zip(self._out, range(_MAX_GATHERED))]
            beside = next((segment for segment in segments if segment.descriptor is not None), None)
            try:
                num_sent = self._send(self._sock, segments, beside)
            except (BlockingIOError, InterruptedError):
                self.is_writable = False
            except OSError as error:
                if beside is not None:  # the peer will say that none came, and the bytes go over the stream
                    beside.descriptor = None
                    continue
                self._shut(f"write failed: {error.strerror or error}")
                return
            else:
                if beside is not None:
                    beside.descriptor = None
                self._sent(num_sent)
        self._watch.want_write(self, self._sock, wanted=bool(self._out))

    @staticmethod
    def _send(sock: socket.socket, segments: list[_Segment], beside: _Segment | None) -> int:
        views = [segment.view for segment in segments]
        if beside is None or beside.descriptor is None:
            return sock.sendmsg(views)
        return socket.send_fds(sock, views, [beside.descriptor])

    def _sent(self, num_bytes: int) -> None:
        self._out_bytes -= num_bytes
        while num_bytes:
            segment = self._out[0]
            if num_bytes < len(segment.view):
                segment.view = segment.view[num_bytes:]
                return
            num_bytes -= len(segment.view)
            self._out.popleft()

    # --- receiving

    def receive(self, sink: Sink) -> bool:
        if self._opening is not None and not self._opened():
            return False
        if self.sharing is not None:
            for tag in self.sharing.take_over():
                sink.on_done(tag)
        for _ in range(_MAX_FRAMES_PER_TURN):
            if self.closed_reason is not None:
                return False
            if self._rest is not None:
                if self._take_payload(sink):
                    return self.closed_reason is None
            elif self._take_frame(sink):
                continue
            if not self._fill():
                return False
        return True

    def _opened(self) -> bool:
        assert self._opening is not None
        outcome = self._opening.turn()
        if outcome is None:
            return False
        if isinstance(outcome, str):
            self._opening = None
            self.closed_reason = outcome
            return False
        self.start(outcome, self._opening.transport, self._opening.address)
        return True

    def _take_frame(self, sink: Sink) -> bool:
        """The next frame out of the buffer; False if it isn't whole yet. Of DATA, only the head."""
        if self._header is None:
            if self._high - self._low < HEADER_BYTES:
                return False
            self._header = parse_header(bytes(self._view[self._low : self._low + HEADER_BYTES]))
            self._low += HEADER_BYTES
        header = self._header
        if self._high - self._low < header.body_bytes:
            return False
        body = bytes(self._view[self._low : self._low + header.body_bytes])
        self._low += header.body_bytes
        self._header = None
        frame = parse_body(header, body)
        if unknown := unknown_in(frame, body):
            sink.on_unknown(unknown)
        if frame is None:
            return True
        if not isinstance(frame, Data):
            sink.on_frame(frame, header.generation)
            return True
        if self.payloads_apart:
            sink.place(frame, header.generation, header.payload_bytes)
            sink.on_frame(frame, header.generation)
            return True
        self._data, self._data_generation = frame, header.generation
        span = sink.place(frame, header.generation, header.payload_bytes)
        self._rest = _scratch(header.payload_bytes) if span is None else self._memory.view(span)
        return True

    def _take_payload(self, sink: Sink) -> bool:
        """Buffered bytes to their place; True when the payload is whole, and said to the sink."""
        assert self._rest is not None and self._data is not None
        num_bytes = min(len(self._rest), self._high - self._low)
        if num_bytes:
            self._rest[:num_bytes] = self._view[self._low : self._low + num_bytes]
            self._low += num_bytes
            self._rest = self._rest[num_bytes:]
        if len(self._rest):
            return False
        frame, self._data, self._rest = self._data, None, None
        sink.on_frame(frame, self._data_generation)
        return True

    def divert(self, tag: int) -> bool:
        if self._rest is not None and self._data is not None and self._data.tag == tag:
            self._rest = _scratch(len(self._rest))
        return self._takes_back

    def _fill(self) -> bool:
        """One read from the socket; False if there is nothing now."""
        if self._sock is None or not self.is_readable:
            return False
        if self._low:
            self._view[: self._high - self._low] = bytes(self._view[self._low : self._high])
            self._low, self._high = 0, self._high - self._low
        room = (
            self._view[self._high :]
            if self._header is not None
            else self._view[self._high :][:_CONTROL_READ_BYTES]
        )
        targets = [room] if self._rest is None else [self._rest, room]
        ancillary_bytes = 0 if self._descriptors is None else self._descriptors.ancillary_bytes
        try:
            num_bytes, ancillary, _flags, _peer = self._sock.recvmsg_into(
                targets, ancillary_bytes, socket.MSG_CMSG_CLOEXEC
            )
        except (BlockingIOError, InterruptedError):
            self.is_readable = False
            return False
        except OSError as error:
            self._shut(f"read failed: {error.strerror or error}")
            return False
        if ancillary and self._descriptors is not None:
            self._descriptors.arrived(ancillary)
        if num_bytes == 0:
            self._shut("the peer closed")
            return False
        self.received_bytes += num_bytes
        self.is_readable = num_bytes == sum(len(target) for target in targets)
        if self._rest is not None:
            num_placed = min(num_bytes, len(self._rest))
            self._rest = self._rest[num_placed:]
            num_bytes -= num_placed
        self._high += num_bytes
        return True

    def post_receive(self, tag: int, into: ByteSpan) -> None:
        raise InvariantViolated("a stream has no posted receives", tag=tag, into=into)

    def read_remote(self, tag: int, reads: Sequence[RemoteRead]) -> bool:
        if self.sharing is None:
            raise InvariantViolated("the peer's pool isn't shared", tag=tag)
        return self.sharing.read(tag, reads)

    # --- the end

    def close(self, reason: str) -> None:
        if self.closed_reason is None:
            self.detach_piece()
            self.flush()
            self._shut(reason)
        if self.sharing is not None:
            self.sharing.close()

    def _shut(self, reason: str) -> None:
        """Let go of the socket, and of all views of the pool."""
        if self.closed_reason is not None:
            return
        self.closed_reason = reason
        self._out.clear()
        self._rest = None
        if self._opening is not None:
            self._opening.close()
            self._opening = None
        if self._sock is not None:
            self._watch.drop(self._sock)
            with contextlib.suppress(OSError):  # the connection is gone already: nothing to tell the peer
                self._sock.shutdown(socket.SHUT_WR)
            self._sock.close()
            self._sock = None


def _scratch(num_bytes: int) -> memoryview:
    """Where a payload goes that nobody waits for; at most one piece."""
    return memoryview(bytearray(num_bytes))
