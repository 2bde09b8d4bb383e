"""An in-memory connection with posted receives, as between two GPUs: the k-th send fills the k-th receive.

The devices move the bytes by themselves: a send is read when its packet leaves, a receive is written when it arrives,
whatever their transfer owners do or know by then. Neither can be taken back: only the abort of the connection, which
takes a while, ends what is under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kv_transfer.transports.port import Sink
from pdserve.kv_memory import ByteSpan
from tests.support.memories import StagedMemory
from tests.support.memory_channel import DeviceWatch, MemoryChannel, Packet, Wires

_MAX_SENDS = 4


class PostedChannel(MemoryChannel):
    """watch: sees the devices at work."""

    def __init__(
        self,
        wires: Wires,
        *,
        name: str,
        peer_name: str,
        memory: StagedMemory,
        wake: Callable[[], None],
        watch: DeviceWatch | None,
    ) -> None:
        super().__init__(wires, name=name, peer_name=peer_name, memory=memory, wake=wake)
        self._watch = watch
        self._num_unsent = 0
        self._posted: deque[tuple[int, ByteSpan]] = deque()
        self._written: deque[int] = deque()  # tags of receives that are over; their frames lie in the inbox
        self._over: deque[int] = deque()  # tags of receives that are over, or dead, with the connection
        self._is_aborting = False

    reads_itself = False
    can_detach = False
    is_posted = True

    @property
    def num_unsent_pieces(self) -> int:
        return self._num_unsent

    @property
    def is_idle(self) -> bool:
        return not (self._num_unsent or self._posted or self._over)

    @property
    def can_send_piece(self) -> bool:
        return self.closed_reason is None and self._far is not None and self._num_unsent < _MAX_SENDS

    def send_piece(self, wire: bytes, span: ByteSpan) -> None:
        self._send(Packet(wire, source=span))

    def skip_piece(self, wire: bytes, num_bytes: int) -> None:
        self._send(Packet(wire, source=self._memory.stage(bytes(num_bytes))))

    def _send(self, packet: Packet) -> None:
        if self.closed_reason is None:
            self._num_unsent += 1
            self._post(packet)

    def post_receive(self, tag: int, into: ByteSpan) -> None:
        if self.closed_reason is None:
            self._posted.append((tag, into))
        else:  # the peer has gone, which the link hasn't read yet: it will never be written
            self._over.append(tag)

    def divert(self, tag: int) -> bool:
        return False

    def receive(self, sink: Sink) -> bool:
        more = super().receive(sink)
        if self._is_aborting:
            while self._over:
                sink.on_done(self._over.popleft())
        return more

    def _put(self, into: ByteSpan | None, payload: bytes) -> None:
        """The device wrote it when it arrived."""
        self._written.popleft()

    def _tell_room(self) -> None:
        """A sender hears when its piece has left."""

    def close(self, reason: str) -> None:
        super().close(reason)
        if not self._is_aborting:
            self._is_aborting = True
            self._over += self._written
            self._written.clear()
            self._wires.schedule(self._wires.delay(), self.abort)

    def abort(self) -> None:
        self._is_aborting = True
        self._wire = deque(packet for packet in self._wire if packet.source is None)
        self._num_unsent = 0
        self._over += [tag for tag, _into in self._posted]
        self._posted.clear()
        self._wake()

    # --- what the devices do

    def _leaves(self, packet: Packet) -> None:
        if packet.source is None:
            return
        if self._watch is not None and not self._memory.is_staged(packet.source):
            self._watch.device_reads(packet.source)
        packet.payload = bytes(self._memory.at(packet.source))
        self._num_unsent -= 1
        self._wake()

    def _arrive(self, packet: Packet) -> None:
        if packet.payload is not None and not self._write(packet.payload):
            return
        super()._arrive(packet)

    def _write(self, payload: bytes) -> bool:
        """Fill the oldest receive, also one of a connection that is closed and not yet aborted."""
        if not self._posted or self._posted[0][1].num_bytes != len(payload):
            if self.closed_reason is None:
                self._post(Packet(end="a send that fits no posted receive"))
                self.closed_reason = "a send that fits no posted receive"
                self._wake()
            return False
        tag, into = self._posted.popleft()
        if self._watch is not None:
            self._watch.device_writes(into)
        self._memory.at(into)[:] = payload
        (self._over if self._is_aborting else self._written).append(tag)
        return True
