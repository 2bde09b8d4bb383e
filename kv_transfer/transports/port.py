"""The transport ports: a Channel is one connection, a Network opens and accepts them.

Called by the transfer owner only. Nothing here blocks. A channel moves bytes when it is told to: `receive` takes in
at most one piece, at most one piece is queued to be sent, so no link can keep the others from their turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kv_transfer.frames import Data, Frame


class Sink(Protocol):
    """Where a channel puts what arrives. Any method may raise a PdserveError: the link then ends."""

    def place(self, data: Data, generation: int, num_bytes: int) -> memoryview:
        """Where the payload behind this DATA goes: exactly so many writable bytes."""
        ...

    def on_frame(self, frame: Frame, generation: int) -> None:
        """A whole frame has come; for DATA, its payload lies where `place` said (or `divert` sent the rest)."""
        ...

    def on_read(self, tag: int) -> None:
        """A `read_remote` is done."""
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
    def one_sided(self) -> bool:
        """Whether D reads P's pool itself (`read_remote`) instead of asking with PULL."""
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
    def num_pending_reads(self) -> int:
        """`read_remote`s not yet done; they go on when the channel is closed."""
        ...

    def send(self, wire: bytes) -> None:
        """Queue an encoded frame. Over the bound of the queue the channel closes itself."""
        ...

    def send_piece(self, wire: bytes, payload: memoryview) -> None:
        """Queue DATA; the payload is read from where it lies until it has gone. Only when `can_send_piece`."""
        ...

    def detach_piece(self) -> None:
        """What is unsent of the queued piece will not be read from the pool any more: the channel keeps a copy."""
        ...

    def divert(self) -> None:
        """The rest of the payload now arriving goes to scratch: nothing more is written to where `place` said."""
        ...

    def read_remote(self, tag: int, start: int, into: memoryview) -> bool:
        """One-sided: copy bytes of P's pool, from `start` on. True: done; False: `on_read(tag)` follows when it is."""
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
