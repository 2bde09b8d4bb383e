"""A connection whose pieces go through pinned memory of the host, to and from a pool that the host can't see.

    P  copy to a slot, event ... over: checksum, the piece is sent from the slot ... sent: the slot is free
    D  the payload arrives in a slot ... whole: copy to the pool, event ... over: the link has it, the slot is free

P's blocks are free when the copies from them are over; what is then unsent lies in slots. D's are QUARANTINED while
copies to them are under way. Without a free slot P hands nothing over, and D asks for nothing.
Where the pieces go another way (nccl, cuda_ipc), it is that connection, unchanged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kv_transfer.frames import Data, Frame, Kind, Pull
from kv_transfer.framing import HEADER_BYTES, encode, kind_of, parse_body, parse_header
from kv_transfer.transports.port import Channel, Joining, RemoteRead, Sharing, Sink
from kv_transfer.transports.staging import Staging
from pdserve.errors import InvariantViolated
from pdserve.kv_memory import XXH3_64, ByteSpan


@dataclass(slots=True, eq=False)
class _Fetch:
    """P: a piece on its way into a slot. is_over: it is there."""

    wire: bytes
    slot: ByteSpan
    is_over: bool = False


@dataclass(slots=True, eq=False)
class _Store:
    """D: a piece on its way out of a slot. is_wanted: its lease isn't over."""

    data: Data
    generation: int
    slot: ByteSpan
    into: ByteSpan
    is_wanted: bool = True


class StagedChannel:
    """staging: shared by all connections of the worker."""

    def __init__(self, inner: Channel, staging: Staging) -> None:
        self._inner = inner
        self._staging = staging
        self._fetches: deque[_Fetch] = deque()  # not yet handed to the connection
        self._sending: deque[ByteSpan] = deque()  # slots that the connection reads
        self._reserved: dict[int, ByteSpan] = {}  # slots for what was asked for, by tag
        self._arriving: _Store | None = None
        self._stores: dict[int, _Store] = {}
        self._over: deque[_Store] = deque()
        self._is_closed = False
        self._gate = _Gate(self)

    @property
    def _is_staged(self) -> bool:
        return not (self._inner.is_posted or self._inner.reads_itself)

    @property
    def transport(self) -> str:
        return self._inner.transport

    @property
    def peer(self) -> str:
        return self._inner.peer

    @property
    def reads_itself(self) -> bool:
        return self._inner.reads_itself

    @property
    def can_detach(self) -> bool:
        return self._inner.can_detach and not self._is_staged

    @property
    def is_posted(self) -> bool:
        return self._inner.is_posted

    @property
    def sharing(self) -> Sharing | None:
        return self._inner.sharing

    @property
    def joining(self) -> Joining | None:
        return self._inner.joining

    @property
    def closed_reason(self) -> str | None:
        return self._inner.closed_reason

    @property
    def received_bytes(self) -> int:
        return self._inner.received_bytes

    # --- P

    @property
    def can_send_piece(self) -> bool:
        if not self._is_staged:
            return self._inner.can_send_piece
        return self.closed_reason is None and self._staging.room(self) > 0

    @property
    def num_unsent_pieces(self) -> int:
        """Staged: those that the device may still read."""
        if not self._is_staged:
            return self._inner.num_unsent_pieces
        return sum(not fetch.is_over for fetch in self._fetches)

    def send(self, wire: bytes) -> None:
        if self._is_staged and kind_of(wire) is Kind.PULL:
            self._reserve(wire)
        self._inner.send(wire)

    def send_piece(self, wire: bytes, span: ByteSpan) -> None:
        if not self._is_staged:
            self._inner.send_piece(wire, span)
        elif self.closed_reason is None:
            fetch = _Fetch(wire, self._staging.take(self, span.num_bytes))
            self._fetches.append(fetch)
            self._staging.fetch(span, fetch.slot, lambda: self._fetched(fetch))

    def _fetched(self, fetch: _Fetch) -> None:
        fetch.is_over = True
        if self._is_closed:
            self._fetches.remove(fetch)
            self._staging.give_back(self, fetch.slot)

    def _send_fetched(self) -> None:
        """Hand what has been fetched to the connection, as far as it would go out next."""
        self._free_sent()
        while self._has_fetched:
            fetch = self._fetches.popleft()
            self._sending.append(fetch.slot)
            self._inner.send_piece(self._checked(fetch), fetch.slot)

    @property
    def _has_fetched(self) -> bool:
        return bool(self._fetches) and self._fetches[0].is_over and self._inner.can_send_piece

    def _checked(self, fetch: _Fetch) -> bytes:
        """Its DATA frame with the checksum, which nobody could compute before."""
        header = parse_header(fetch.wire[:HEADER_BYTES])
        data = parse_body(header, fetch.wire[HEADER_BYTES:])
        checksum = self._staging.memory.checksum(XXH3_64, fetch.slot)
        assert isinstance(data, Data) and checksum is not None
        return encode(Data(data.lease_id, data.tag, checksum), header.generation, fetch.slot.num_bytes)

    def _free_sent(self) -> None:
        while len(self._sending) > self._inner.num_unsent_pieces:
            self._staging.give_back(self, self._sending.popleft())

    def skip_piece(self, wire: bytes, num_bytes: int) -> None:
        self._inner.skip_piece(wire, num_bytes)

    def detach_piece(self) -> None:
        if self._is_staged:
            raise InvariantViolated("what a device reads can't be taken back", peer=self.peer)
        self._inner.detach_piece()

    def flush(self) -> None:
        self._send_fetched()
        self._inner.flush()
        self._free_sent()

    # --- D

    @property
    def pull_room(self) -> int:
        return self._staging.room(self) if self._is_staged else self._inner.pull_room

    def _reserve(self, wire: bytes) -> None:
        """A slot for each piece that this PULL asks for."""
        pull = parse_body(parse_header(wire[:HEADER_BYTES]), wire[HEADER_BYTES:])
        assert isinstance(pull, Pull)
        for piece in pull.pieces:
            self._reserved[piece.tag] = self._staging.take(self, piece.num_bytes)

    def post_receive(self, tag: int, into: ByteSpan) -> None:
        self._inner.post_receive(tag, into)

    def read_remote(self, tag: int, reads: Sequence[RemoteRead]) -> bool:
        return self._inner.read_remote(tag, reads)

    def divert(self, tag: int) -> bool:
        if (store := self._stores.get(tag)) is not None:
            store.is_wanted = False
            return False
        diverted = self._inner.divert(tag)
        slot = self._reserved.pop(tag, None)
        if self._arriving is not None and self._arriving.data.tag == tag:
            slot, self._arriving = self._arriving.slot, None
        if slot is not None:
            self._staging.give_back(self, slot)
        return diverted

    def receive(self, sink: Sink) -> bool:
        if self._deliver(sink):
            return True
        if self._is_closed or not self._is_staged:
            return self._inner.receive(sink)
        self._gate.inner = sink
        return self._inner.receive(self._gate)

    def place(self, data: Data, generation: int, into: ByteSpan | None) -> ByteSpan | None:
        """The head of a piece has come. returns: where its payload goes; None: away."""
        slot = None if into is None else self._reserved.pop(data.tag, None)
        if into is None or slot is None:
            return None
        self._arriving = _Store(data, generation, slot, into)
        return slot

    def landed(self, data: Data) -> bool:
        """A payload is whole. returns: whether the link hears of it later, when it is in the pool."""
        store, self._arriving = self._arriving, None
        if store is None:
            return False
        self._stores[data.tag] = store
        self._staging.store(store.slot, store.into, lambda: self._over.append(store))
        return True

    def is_stored(self, tag: int) -> bool:
        """Whether a piece of this tag is on its way into the pool: another one is a copy of it."""
        return tag in self._stores

    def _deliver(self, sink: Sink) -> bool:
        """Tell the link of what is over, up to the first piece that it wants. Returns whether there was one."""
        while self._over:
            store = self._over.popleft()
            del self._stores[store.data.tag]
            try:
                if store.is_wanted:
                    self._staging.memory.landed[store.into] = store.slot
                    sink.on_frame(store.data, store.generation)
                    return True
                sink.on_done(store.data.tag)
            finally:
                self._staging.memory.landed.pop(store.into, None)
                self._staging.give_back(self, store.slot)
        return False

    # --- time and the end

    @property
    def is_idle(self) -> bool:
        return self._inner.is_idle and not (self._fetches or self._stores)

    def next_due_s(self) -> float | None:
        """A connection that can take a piece again wakes nobody for those that have been fetched meanwhile."""
        return self._staging.now_s() if self._has_fetched else None

    def close(self, reason: str) -> None:
        self._inner.close(reason)
        if self._is_closed:
            return
        self._is_closed = True
        unused = [*self._sending, *(fetch.slot for fetch in self._fetches if fetch.is_over)]
        unused += self._reserved.values()
        if self._arriving is not None:
            unused.append(self._arriving.slot)
        for slot in unused:
            self._staging.give_back(self, slot)
        self._fetches = deque(fetch for fetch in self._fetches if not fetch.is_over)
        self._sending.clear()
        self._reserved.clear()
        self._arriving = None


class _Gate:
    """The link's sink, as the connection sees it: pieces land in slots, and reach the link from the pool."""

    def __init__(self, channel: StagedChannel) -> None:
        self.inner: Sink
        self._channel = channel

    def place(self, data: Data, generation: int, num_bytes: int) -> ByteSpan | None:
        return self._channel.place(data, generation, self.inner.place(data, generation, num_bytes))

    def on_frame(self, frame: Frame, generation: int) -> None:
        if isinstance(frame, Data):
            if self._channel.landed(frame):
                return
            if self._channel.is_stored(frame.tag):
                frame = Data(frame.lease_id, 0, frame.checksum)  # asked for by nobody
        self.inner.on_frame(frame, generation)

    def on_done(self, tag: int) -> None:
        self.inner.on_done(tag)

    def on_unknown(self, what: str) -> None:
        self.inner.on_unknown(what)
