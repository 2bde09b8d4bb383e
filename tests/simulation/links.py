"""The links' network of one simulated worker: troubled when it is told to, watched all the time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kv_transfer.frames import Data, Frame, Kind
from kv_transfer.framing import HEADER_BYTES, parse_body, parse_header
from kv_transfer.transports.port import Channel, Network, RemoteRead, Sink
from pdserve.clock import Clock
from pdserve.engine.block_pool import BlockPool, BlockState
from pdserve.ids import Random
from pdserve.kv_memory import ByteSpan
from tests.simulation.tape import Tape
from tests.support.faulty_link import Action, FaultyChannel, FaultyNetwork
from tests.support.memories import StagedMemory

NOISE = {Action.DELAY: 0.15, Action.DUPLICATE: 0.15}
"""What a noisy link does to its frames, by probability. While a connection lives, it loses and reorders none."""


class LinkTrouble:
    """A fault plan for all links of one worker, as the frames go out.

    dies, dies_at           the next frame (of that kind) ends its link; on_death is told
    num_corrupt_left        so many pieces are corrupted, of those whose lease `corrupts` takes
    """

    def __init__(self, random: Random) -> None:
        self.num_corrupt_left = 0
        self.corrupts: Callable[[int], bool] = lambda lease_id: False
        self._corrupts_next = False
        self.is_noisy = False
        self.dies = False
        self.dies_at: Kind | None = None
        self.on_death: Callable[[], None] = lambda: None
        self._random = random

    def on_piece(self, lease_id: int) -> None:
        """The next frame is a piece of this lease."""
        self._corrupts_next = self.num_corrupt_left > 0 and self.corrupts(lease_id)
        self.num_corrupt_left -= self._corrupts_next

    def decide(self, kind: Kind, _index: int) -> Action | None:
        if self.dies and self.dies_at in (None, kind):
            self.dies = False
            self.on_death()
            return Action.DIE
        if kind is Kind.DATA and self._corrupts_next:
            self._corrupts_next = False
            return Action.CORRUPT
        if not self.is_noisy:
            return None
        draw = self._random.random()
        for action, rate in NOISE.items():
            draw -= rate
            if draw < 0:
                return action
        return None


class PoolWatch:
    """Who may touch which bytes of one worker's pool: the transfer owner writes granted blocks only, and nobody else
    does while they are granted.

    pool     the pool's states, as its engine owner has them now
    violate  told what was wrong
    """

    def __init__(
        self,
        worker_id: str,
        block_bytes: int,
        num_blocks: int,
        pool: Callable[[], BlockPool | None],
        violate: Callable[[str], None],
    ) -> None:
        self._worker_id = worker_id
        self._block_bytes = block_bytes
        self._num_blocks = num_blocks
        self._pool = pool
        self._violate = violate

    def block_of(self, span: ByteSpan | None) -> int | None:
        """The block that a span begins in; None outside the pool."""
        block_id = None if span is None else span.start // self._block_bytes
        return block_id if block_id is not None and block_id < self._num_blocks else None

    def writes(self, block_id: int | None, *allowed: BlockState) -> None:
        """The transfer owner writes into it now."""
        self._expect("written over a link", block_id, allowed)

    def sends(self, block_id: int | None) -> None:
        """The transfer owner reads it for a peer now."""
        self._expect("sent", block_id, (BlockState.OWNED,))

    def device_reads(self, span: ByteSpan) -> None:
        """A send of a posted link is carried out."""
        self.sends(self.block_of(span))

    def device_writes(self, span: ByteSpan) -> None:
        """A receive of a posted link is carried out, whether its lease is still wanted or not."""
        self.writes(self.block_of(span), BlockState.GRANTED, BlockState.QUARANTINED)

    def _expect(self, what: str, block_id: int | None, allowed: tuple[BlockState, ...]) -> None:
        pool = self._pool()
        if block_id is None or pool is None:
            return
        state = pool.state(block_id)
        if state not in allowed:
            self._violate(f"{self._worker_id}: block {block_id} is {what} while it is {state.name}")


class SimNetwork(FaultyNetwork):
    """A FaultyNetwork of SimChannels. name: of the worker, for the tape; num_confirms: CONFIRMs that have arrived."""

    def __init__(
        self,
        inner: Network,
        clock: Clock,
        trouble: LinkTrouble,
        memory: StagedMemory,
        watch: PoolWatch,
        tape: Tape,
        name: str,
    ) -> None:
        super().__init__(inner, clock, lambda dialled: trouble, memory)
        self.memory = memory
        self.trouble = trouble
        self.watch = watch
        self.tape = tape
        self.name = name
        self.num_confirms = 0
        self._its_clock = clock

    def _wrap(self, channel: Channel, dialled: bool) -> Channel:
        watched = SimChannel(channel, self._its_clock, self)
        self._faulty.append(watched)
        return watched


class SimChannel(FaultyChannel):
    """A FaultyChannel that tells the tape what passes, and the watch what is touched."""

    def __init__(self, inner: Channel, clock: Clock, network: SimNetwork) -> None:
        super().__init__(inner, network.trouble, clock, network.memory)
        self._network = network
        self._trouble = network.trouble
        self._watch = network.watch
        self._tape = network.tape
        peer = inner.peer.removeprefix("mem://")
        self._way = f"{network.name}>{peer}"
        self._back = f"{peer}>{network.name}"
        self._reads: dict[int, list[int | None]] = {}
        self._sink = _WatchedSink(self)

    def send(self, wire: bytes) -> None:
        if self._tape.full:
            self._tape.message(self._way + " sends", _frame(wire))
        super().send(wire)

    def send_piece(self, wire: bytes, span: ByteSpan) -> None:
        self._watch.sends(self._watch.block_of(span))
        self._trouble.on_piece(_lease_of(wire))
        if self._tape.full:
            self._tape.message(self._way + " sends", _frame(wire))
        super().send_piece(wire, span)

    def read_remote(self, tag: int, reads: Sequence[RemoteRead]) -> bool:
        block_ids = [self._watch.block_of(ByteSpan(into, num_bytes)) for _start, into, num_bytes in reads]
        for block_id in block_ids:
            self._watch.writes(block_id, BlockState.GRANTED)
        done = super().read_remote(tag, reads)
        if not done:
            self._reads[tag] = block_ids
        return done

    def receive(self, sink: Sink) -> bool:
        self._sink.inner = sink
        return super().receive(self._sink)

    # --- what arrives

    def on_place(self, into: ByteSpan | None) -> None:
        """A payload is about to be written there (posted: counts now)."""
        self._watch.writes(self._watch.block_of(into), BlockState.GRANTED)

    def on_frame(self, frame: Frame) -> None:
        """A frame has arrived."""
        if frame.kind is Kind.CONFIRM:
            self._network.num_confirms += 1
        self._tape.message(self._back + " has", frame)

    def on_done(self, tag: int) -> None:
        """A read is done, or a posted receive is over; its lease may have ended meanwhile."""
        for block_id in self._reads.pop(tag, ()):
            self._watch.writes(block_id, BlockState.GRANTED, BlockState.QUARANTINED)


class _WatchedSink:
    """The link's sink, seen by the channel."""

    def __init__(self, channel: SimChannel) -> None:
        self.inner: Sink
        self._channel = channel

    def place(self, data: Data, generation: int, num_bytes: int) -> ByteSpan | None:
        into = self.inner.place(data, generation, num_bytes)
        self._channel.on_place(into)
        return into

    def on_frame(self, frame: Frame, generation: int) -> None:
        self._channel.on_frame(frame)
        self.inner.on_frame(frame, generation)

    def on_done(self, tag: int) -> None:
        self._channel.on_done(tag)
        self.inner.on_done(tag)

    def on_unknown(self, what: str) -> None:
        self.inner.on_unknown(what)


def _frame(wire: bytes) -> Frame:
    frame = parse_body(parse_header(wire[:HEADER_BYTES]), wire[HEADER_BYTES:])
    assert frame is not None
    return frame


def _lease_of(wire: bytes) -> int:
    frame = _frame(wire)
    return frame.lease_id if isinstance(frame, Data) else 0
