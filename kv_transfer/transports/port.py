"""The transport ports: a Channel is one connection, a Network opens and accepts them.

Called by the transfer owner only. Nothing here blocks. A channel moves bytes when it is told to: `receive` takes in
at most one piece, and only a few pieces wait to be sent, so no link can keep the others from their turn.

Three facts say how a channel moves the bytes of a piece between the two memories, and who must wait for it:

    reads_itself   D reads P's memory (`read_remote`) instead of asking with PULL; READY carries P's block ids
    can_detach     P's blocks are free as soon as P says so: unsent bytes are copied away, a late reader does no harm.
                   Else they stay RELEASING until the sends under way are over, or D has said RELEASED
    is_posted      as over NCCL: D posts a receive for each piece before it asks, P sends each piece that was asked for,
                   in that order, and both learn by polling what is over

D's blocks are free as soon as D says so, unless something is being written there that can't be taken back (`divert`):
then they are QUARANTINED until it is over, or dead with its connection.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kv_transfer.frames import Data, Frame
from pdserve.kv_memory import ByteSpan

RemoteRead = tuple[int, int, int]
"""A run of bytes that D reads itself: where it begins in P's pool, where in D's, and its length. Plain, because one is
made for each piece."""


class Sink(Protocol):
    """Where a channel puts what arrives. Any method may raise a PdserveError: the link then ends."""

    def place(self, data: Data, generation: int, num_bytes: int) -> ByteSpan | None:
        """Where the payload behind this DATA goes (posted: lies); None: nobody waits for it, it is thrown away."""
        ...

    def on_frame(self, frame: Frame, generation: int) -> None:
        """A whole frame has come; for DATA, its payload lies where `place` said (unless it was diverted)."""
        ...

    def on_done(self, tag: int) -> None:
        """A `read_remote` is done; or what couldn't be diverted, or was posted on a dead connection, is over."""
        ...

    def on_unknown(self, what: str) -> None:
        """A frame of a later version came: of a "kind" that was skipped, or with a "field" that was."""
        ...


class Sharing(Protocol):
    """The way in which a connection passes P's memory to D, which then reads it itself.

    kind        the transport that the connection is with it
    is_at_once  a read is over when `read` returns; else it is under way, and can't be taken back
    is_read     D reads P's memory from now on
    """

    @property
    def kind(self) -> str: ...
    @property
    def is_at_once(self) -> bool: ...
    @property
    def is_read(self) -> bool: ...

    def export(self) -> bytes:
        """P: names its memory to D; b"": what does travels beside the frame."""
        ...

    def pass_memory(self, wire: bytes) -> None:
        """P: queue the frame with that name, and what else D needs beside it."""
        ...

    def begin(self) -> None:
        """P: D has taken it, and reads from now on."""
        ...

    def expect_memory(self) -> None:
        """D: it may come now, beside a frame."""
        ...

    def take_memory(self, handle: bytes, num_bytes: int) -> None:
        """D: what came with the frame now being handled is read from now on.

        Raises InvalidRequest or WorkerLost: why it can't be.
        """
        ...

    def read(self, tag: int, reads: Sequence[RemoteRead]) -> bool:
        """As `Channel.read_remote`."""
        ...

    def take_over(self) -> Sequence[int]:
        """Tags of reads that are over since the last call, also after `close`."""
        ...

    @property
    def is_idle(self) -> bool:
        """Whether no read is under way, and all that are over have been taken."""
        ...

    def close(self) -> None:
        """Begin no more reads. Idempotent."""
        ...


class Joining(Protocol):
    """The way in which both ends of a connection become ranks of a communicator that moves the pieces (NCCL)."""

    def make_id(self) -> bytes:
        """D: names the communicator to be made. Who knows it can join. Raises WorkerLost: why there can be none."""
        ...

    def join(self, unique_id: bytes, rank: int) -> None:
        """Begin to be a rank. Raises Overloaded if there are too many communicators."""
        ...

    def outcome(self) -> str | None:
        """ "": it is made; else why it never will be; None: not known yet, within link_s it is."""
        ...

    def use(self) -> None:
        """The pieces go over it from here on: the connection is posted."""
        ...

    def leave(self) -> None:
        """It isn't wanted, and is ended. Idempotent."""
        ...


class Channel(Protocol):
    """One connection, ordered both ways. May still be connecting: what is sent meanwhile waits."""

    @property
    def transport(self) -> str:
        """What it runs over, for logs, metrics and PairState; "" while connecting."""
        ...

    @property
    def peer(self) -> str:
        """Address of the other end, for logs."""
        ...

    @property
    def reads_itself(self) -> bool: ...

    @property
    def can_detach(self) -> bool: ...

    @property
    def is_posted(self) -> bool: ...

    @property
    def sharing(self) -> Sharing | None:
        """None: P's memory can't be passed over this connection."""
        ...

    @property
    def joining(self) -> Joining | None:
        """None: there is nothing to join."""
        ...

    @property
    def closed_reason(self) -> str | None:
        """Why the connection is over; None while it lives. What had arrived before may still be received."""
        ...

    @property
    def received_bytes(self) -> int:
        """All that ever arrived; its growth is the peer's sign of life."""
        ...

    @property
    def can_send_piece(self) -> bool:
        """Whether a piece would go out next, and not queue up."""
        ...

    @property
    def pull_room(self) -> int:
        """How many more pieces D may ask for by PULL now."""
        ...

    @property
    def num_unsent_pieces(self) -> int:
        """Pieces handed to `send_piece` that may still be read from memory, or wait; the oldest go first."""
        ...

    @property
    def is_idle(self) -> bool:
        """Whether nothing that was begun will still touch memory. What can't be taken back goes on after `close`."""
        ...

    def send(self, wire: bytes) -> None:
        """Queue an encoded frame. Over the bound of the queue the channel closes itself."""
        ...

    def send_piece(self, wire: bytes, span: ByteSpan) -> None:
        """Queue DATA; the payload is read from where it lies until it has gone. Only when `can_send_piece`."""
        ...

    def skip_piece(self, wire: bytes, num_bytes: int) -> None:
        """Posted: as `send_piece`, for a piece whose lease is over: bytes without meaning, in its place."""
        ...

    def detach_piece(self) -> None:
        """What is unsent will no longer be read from the pool: the channel keeps a copy. Only if `can_detach`."""
        ...

    def post_receive(self, tag: int, into: ByteSpan) -> None:
        """Posted: the next piece goes there. Frames sent afterwards go out only when the receive stands.

        Of a receive posted on a dead connection, too, `on_done` says that it is over; its blocks are quarantined else.
        """
        ...

    def divert(self, tag: int) -> bool:
        """D no longer wants the piece asked for under this tag: the rest of its payload goes elsewhere.

        False: what is being written can't be taken back; `on_done(tag)` follows when it is over.
        """
        ...

    def read_remote(self, tag: int, reads: Sequence[RemoteRead]) -> bool:
        """Copy out of P's pool. True: all are done; False: `on_done(tag)` follows when they are.

        It does whatever becomes of the connection, also after WorkerLost, which says that not all could be begun.
        """
        ...

    def receive(self, sink: Sink) -> bool:
        """Take in what has arrived, at most one piece. True if there may be more at once."""
        ...

    def flush(self) -> None:
        """Send what is queued, as far as it goes without waiting."""
        ...

    def close(self, reason: str) -> None:
        """End the connection, after a last try to send what is queued. Idempotent."""
        ...


class Network(Protocol):
    """Opens and accepts channels."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where others reach this worker, the preferred first: unix:///path, tcp://host:port, mem://name."""
        ...

    def dial(self, addresses: Sequence[str]) -> Channel:
        """Begin to connect to a worker by one of its addresses; a failure shows as the channel's closed_reason."""
        ...

    def accept(self) -> Sequence[Channel]:
        """Connections that came since the last call."""
        ...

    def poll(self) -> None:
        """Find out which channels have something to do. Doesn't wait."""
        ...

    def next_due_s(self) -> float | None:
        """The clock's moment at which some channel wants its turn without any I/O; None: never."""
        ...

    def close(self) -> None:
        """Stop listening, close what is open, leave no name behind. Idempotent."""
        ...
