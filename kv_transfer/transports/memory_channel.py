"""One end of an in-memory connection."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kv_transfer.frames import Data
from kv_transfer.framing import HEADER_BYTES, parse_body, parse_header
from kv_transfer.transports.port import Sink
from pdserve.clock import Clock
from pdserve.errors import InvariantViolated

Schedule = Callable[[float, Callable[[], None]], object]
"""Calls a function after so many seconds."""

MAX_QUEUED_FRAMES = 8192
_MAX_UNREAD_PIECES = 2
_MAX_FRAMES_PER_TURN = 64


@dataclass(slots=True, eq=False)
class _Packet:
    """A frame (and its payload) as sent, or, `end` set, the end of the connection."""

    wire: bytes = b""
    payload: bytes | None = None
    end: str | None = None


class Wires(Protocol):
    """What a channel needs of the network."""

    @property
    def clock(self) -> Clock: ...
    @property
    def schedule(self) -> Schedule: ...
    @property
    def delay(self) -> Callable[[], float]: ...
    @property
    def one_sided(self) -> bool: ...
    @property
    def copy_delay(self) -> Callable[[], float] | None: ...
    def holds(self, channel: MemoryChannel, source: str, target: str) -> bool: ...


class MemoryChannel:
    """Sends into its own ordered wire; receives from its inbox."""

    def __init__(self, wires: Wires, *, name: str, peer_name: str, wake: Callable[[], None]) -> None:
        self.peer_name = peer_name
        self.remote_pool: memoryview | None = None
        self.closed_reason: str | None = None
        self.received_bytes = 0
        self._wires = wires
        self._name = name
        self._wake = wake
        self._far: MemoryChannel | None = None
        self._connect: Callable[[MemoryChannel], MemoryChannel | None] | None = None
        self._wire: deque[_Packet] = deque()
        self._inbox: deque[_Packet] = deque()
        self._reads_done: deque[int] = deque()
        self.num_pending_reads = 0

    # --- the Channel port

    @property
    def transport(self) -> str:
        return "memory-one-sided" if self._wires.one_sided else "memory"

    @property
    def peer(self) -> str:
        return "mem://" + self.peer_name

    @property
    def one_sided(self) -> bool:
        return self._wires.one_sided

    @property
    def can_send_piece(self) -> bool:
        if self.closed_reason is not None or self._far is None:
            return False
        unread = [packet for packet in (*self._wire, *self._far._inbox) if packet.payload is not None]
        return len(unread) < _MAX_UNREAD_PIECES

    def send(self, wire: bytes) -> None:
        self._post(_Packet(wire))

    def send_piece(self, wire: bytes, payload: memoryview) -> None:
        self._post(_Packet(wire, bytes(payload)))

    def detach_piece(self) -> None:
        """Pieces are copied when sent."""

    def divert(self) -> None:
        """Pieces arrive whole."""

    def read_remote(self, tag: int, start: int, into: memoryview) -> bool:
        """Without a copy_delay the bytes are read now; with one, when the copy is done."""
        if self.remote_pool is None:
            raise InvariantViolated("a one-sided read without a remote pool", peer=self.peer_name)
        source = self.remote_pool[start : start + len(into)]
        if self._wires.copy_delay is None:
            into[:] = source
            return True
        self.num_pending_reads += 1

        def copied() -> None:
            into[:] = source
            self._reads_done.append(tag)
            self._wake()

        self._wires.schedule(self._wires.copy_delay(), copied)
        return False

    def receive(self, sink: Sink) -> bool:
        while self._reads_done:
            self.num_pending_reads -= 1
            sink.on_read(self._reads_done.popleft())
        for _ in range(_MAX_FRAMES_PER_TURN):
            if self.closed_reason is not None or not self._inbox:
                break
            packet = self._inbox.popleft()
            if packet.end is not None:
                self.closed_reason = packet.end
                break
            self._take(packet, sink)
            if packet.payload is not None:
                self._tell_room()
                break
        return self.closed_reason is None and bool(self._inbox)

    def _take(self, packet: _Packet, sink: Sink) -> None:
        header = parse_header(packet.wire[:HEADER_BYTES])
        frame = parse_body(header, packet.wire[HEADER_BYTES:])
        if isinstance(frame, Data):
            assert packet.payload is not None
            sink.place(frame, header.generation, len(packet.payload))[:] = packet.payload
        sink.on_frame(frame, header.generation)

    def _tell_room(self) -> None:
        """A sender that waited for `can_send_piece` takes a turn, as one does whose socket has become writable."""
        if self._far is not None:
            self._wires.schedule(self._wires.delay(), self._far._wake)

    def flush(self) -> None:
        """What is sent is on its way already."""

    def close(self, reason: str) -> None:
        if self.closed_reason is not None:
            return
        self._post(_Packet(end=f"the peer closed: {reason}"))
        self.closed_reason = reason
        self._inbox.clear()

    # --- the wire

    def connect(self, connect: Callable[[MemoryChannel], MemoryChannel | None]) -> None:
        """Dialler: `connect` makes the other end when the first packet arrives, or refuses with None."""
        self._connect = connect
        self._post(_Packet())

    def _post(self, packet: _Packet) -> None:
        if self.closed_reason is not None:
            return
        queued = len(self._wire) + (0 if self._far is None else len(self._far._inbox))
        if queued >= MAX_QUEUED_FRAMES and packet.end is None:
            self.close("the peer doesn't read")
            return
        self._wire.append(packet)
        self._wires.schedule(self._wires.delay(), self._deliver)

    def retry_delivery(self) -> None:
        """A cut has healed: what waits sets out again."""
        for _ in range(len(self._wire)):
            self._wires.schedule(self._wires.delay(), self._deliver)

    def _deliver(self) -> None:
        """One call for each packet; each call takes the oldest, so the order holds whatever the delays."""
        if not self._wire or self._wires.holds(self, self._name, self.peer_name):
            return
        packet = self._wire.popleft()
        if self._connect is not None:
            self._far, self._connect = self._connect(self), None
            if self._far is not None:
                self._far._far = self
                return
        if self._far is not None:
            self._far._arrive(packet)
        elif self.closed_reason is None:
            self._wire.clear()
            self.closed_reason = "connection refused"
            self._wake()

    def _arrive(self, packet: _Packet) -> None:
        if self.closed_reason is not None:
            return
        self.received_bytes += len(packet.wire) + (0 if packet.payload is None else len(packet.payload))
        self._inbox.append(packet)
        self._wake()
