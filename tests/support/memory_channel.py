"""One end of an in-memory connection, two-sided or one-sided; posted_channel.py has the third kind."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Protocol

from kv_transfer.frames import MAX_PULLED_PIECES, Data
from kv_transfer.framing import HEADER_BYTES, parse_body, parse_header, unknown_in
from kv_transfer.transports.port import RemoteRead, Sharing, Sink
from pdserve.clock import Clock
from pdserve.errors import InvariantViolated
from pdserve.kv_memory import ByteSpan
from tests.support.memories import StagedMemory

Schedule = Callable[[float, Callable[[], None]], object]
"""Calls a function after so many seconds."""

MAX_QUEUED_FRAMES = 8192
_MAX_UNREAD_PIECES = 2
_MAX_FRAMES_PER_TURN = 64


class WireKind(Enum):
    """How pieces move: copied with their frame; read by D itself (at once, or by a device copy); posted; over NCCL;
    by CUDA IPC; through pinned memory. The last three are what workers put over a two-sided network.
    """

    TWO_SIDED = "memory"
    ONE_SIDED = "memory-one-sided"
    POSTED = "posted"
    NCCL = "nccl"
    CUDA_IPC = "cuda_ipc"
    STAGED = "staged"


@dataclass(slots=True, eq=False)
class Packet:
    """A frame (and its payload) as sent, or, `end` set, the end of the connection.

    source  posted: where the payload is read when the packet leaves
    """

    wire: bytes = b""
    payload: bytes | None = None
    end: str | None = None
    source: ByteSpan | None = None


class DeviceWatch(Protocol):
    """Told in the moment in which a device touches a worker's memory, whatever its transfer owner knows of it."""

    def device_reads(self, span: ByteSpan) -> None: ...
    def device_writes(self, span: ByteSpan) -> None: ...


class Wires(Protocol):
    """What a channel needs of the network."""

    @property
    def clock(self) -> Clock: ...
    @property
    def schedule(self) -> Schedule: ...
    @property
    def delay(self) -> Callable[[], float]: ...
    @property
    def kind(self) -> WireKind: ...
    @property
    def copy_delay(self) -> Callable[[], float] | None: ...
    @property
    def bytes_per_s(self) -> float | None: ...
    def holds(self, channel: MemoryChannel, source: str, target: str) -> bool: ...


class MemoryChannel:
    """Sends into its own ordered wire; receives from its inbox."""

    def __init__(
        self, wires: Wires, *, name: str, peer_name: str, memory: StagedMemory, wake: Callable[[], None]
    ) -> None:
        self.peer_name = peer_name
        self.remote_memory: StagedMemory | None = None
        self.closed_reason: str | None = None
        self.received_bytes = 0
        self.sharing: Sharing | None = None
        self.joining = None
        self.payloads_apart = False
        self._wires = wires
        self._name = name
        self._memory = memory
        self._wake = wake
        self._far: MemoryChannel | None = None
        self._connect: Callable[[MemoryChannel], MemoryChannel | None] | None = None
        self._wire: deque[Packet] = deque()
        self._inbox: deque[Packet] = deque()
        self._reads_done: deque[int] = deque()
        self._num_pending_reads = 0
        self._busy_until_s = 0.0

    # --- the Channel port

    @property
    def transport(self) -> str:
        return self._wires.kind.value

    @property
    def peer(self) -> str:
        return "mem://" + self.peer_name

    @property
    def reads_itself(self) -> bool:
        return self._wires.kind is WireKind.ONE_SIDED

    @property
    def can_detach(self) -> bool:
        """Pieces are copied when sent, and reads that are done within a turn don't keep P waiting."""
        return self._wires.copy_delay is None

    is_posted = False
    pull_room = MAX_PULLED_PIECES

    @property
    def num_unsent_pieces(self) -> int:
        return 0

    @property
    def is_idle(self) -> bool:
        return self._num_pending_reads == 0

    @property
    def can_send_piece(self) -> bool:
        if self.closed_reason is not None or self._far is None:
            return False
        unread = [packet for packet in (*self._wire, *self._far._inbox) if packet.payload is not None]
        return len(unread) < _MAX_UNREAD_PIECES

    def send(self, wire: bytes) -> None:
        self._post(Packet(wire))

    def send_piece(self, wire: bytes, span: ByteSpan) -> None:
        self._post(Packet(wire, bytes(self._memory.at(span))))

    def skip_piece(self, wire: bytes, num_bytes: int) -> None:
        raise InvariantViolated("nothing is posted here", num_bytes=num_bytes)

    def detach_piece(self) -> None:
        """Pieces are copied when sent."""

    def post_receive(self, tag: int, into: ByteSpan) -> None:
        raise InvariantViolated("nothing is posted here", tag=tag, into=into)

    def divert(self, tag: int) -> bool:
        """Pieces arrive whole; reads that aren't done within a turn go on."""
        return self._wires.copy_delay is None

    def read_remote(self, tag: int, reads: Sequence[RemoteRead]) -> bool:
        """Without a copy_delay the bytes are read now; with one, each when its copy is done."""
        if self.remote_memory is None:
            raise InvariantViolated("a one-sided read without a remote pool", peer=self.peer_name)
        under_way = deque(self._copy(*read) for read in reads)
        if self._wires.copy_delay is None:
            for copy in under_way:
                copy()
            return True
        self._num_pending_reads += 1

        def copied(copy: Callable[[], None]) -> None:
            copy()
            under_way.pop()
            if not under_way:
                self._reads_done.append(tag)
                self._wake()

        for copy in list(under_way):
            self._wires.schedule(self._wires.copy_delay(), partial(copied, copy))
        return False

    def _copy(self, start: int, into: int, num_bytes: int) -> Callable[[], None]:
        assert self.remote_memory is not None
        source = self.remote_memory.at(ByteSpan(start, num_bytes))
        target = self._memory.at(ByteSpan(into, num_bytes))

        def copy() -> None:
            target[:] = source

        return copy

    def receive(self, sink: Sink) -> bool:
        while self._reads_done:
            self._num_pending_reads -= 1
            sink.on_done(self._reads_done.popleft())
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

    def _take(self, packet: Packet, sink: Sink) -> None:
        header = parse_header(packet.wire[:HEADER_BYTES])
        frame = parse_body(header, packet.wire[HEADER_BYTES:])
        if unknown := unknown_in(frame, packet.wire[HEADER_BYTES:]):
            sink.on_unknown(unknown)
        if frame is None:
            return
        if isinstance(frame, Data):
            into = sink.place(frame, header.generation, header.payload_bytes)
            if not self.payloads_apart:
                assert packet.payload is not None
                self._put(into, packet.payload)
        sink.on_frame(frame, header.generation)

    def _put(self, into: ByteSpan | None, payload: bytes) -> None:
        if into is not None:
            self._memory.at(into)[:] = payload

    def _tell_room(self) -> None:
        """A sender that waited for `can_send_piece` takes a turn, as one does whose socket has become writable."""
        if self._far is not None:
            self._wires.schedule(self._wires.delay(), self._far._wake)

    def flush(self) -> None:
        """What is sent is on its way already."""

    def close(self, reason: str) -> None:
        if self.closed_reason is not None:
            return
        self._post(Packet(end=f"the peer closed: {reason}"))
        self.closed_reason = reason
        self._inbox.clear()

    def abort(self) -> None:
        """The process is gone, or needs its memory: nothing touches it from here on."""

    # --- the wire

    def connect(self, connect: Callable[[MemoryChannel], MemoryChannel | None]) -> None:
        """Dialler: `connect` makes the other end when the first packet arrives, or refuses with None."""
        self._connect = connect
        self._post(Packet())

    def _post(self, packet: Packet) -> None:
        if self.closed_reason is not None:
            return
        queued = len(self._wire) + (0 if self._far is None else len(self._far._inbox))
        if queued >= MAX_QUEUED_FRAMES and packet.end is None:
            self.close("the peer doesn't read")
            return
        self._wire.append(packet)
        self._wires.schedule(self._wires.delay() + self._queued_s(packet), self._deliver)

    def _queued_s(self, packet: Packet) -> float:
        """Until a wire that carries so much a second has carried it, too."""
        if self._wires.bytes_per_s is None:
            return 0.0
        now_s, num_bytes = self._wires.clock.now_s(), len(packet.wire)
        if packet.source is not None:
            num_bytes += packet.source.num_bytes
        elif packet.payload is not None:
            num_bytes += len(packet.payload)
        self._busy_until_s = max(now_s, self._busy_until_s) + num_bytes / self._wires.bytes_per_s
        return self._busy_until_s - now_s

    def retry_delivery(self) -> None:
        """A cut has healed: what waits sets out again."""
        for _ in range(len(self._wire)):
            self._wires.schedule(self._wires.delay(), self._deliver)

    def _deliver(self) -> None:
        """One call for each packet; each call takes the oldest, so the order holds whatever the delays."""
        if not self._wire or self._wires.holds(self, self._name, self.peer_name):
            return
        packet = self._wire.popleft()
        self._leaves(packet)
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

    def _leaves(self, packet: Packet) -> None:
        """The packet is on its way."""

    def _arrive(self, packet: Packet) -> None:
        if self.closed_reason is not None:
            return
        self.received_bytes += len(packet.wire) + (0 if packet.payload is None else len(packet.payload))
        self._inbox.append(packet)
        self._wake()
