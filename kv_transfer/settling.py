"""How the pieces of a proven link will move, where that takes more than a word: agreed upon before the link is up.

    P  memfd, cuda_ipc                              D
    |  MEMORY + its descriptor, or its handle ---->  |  maps it
    | <------------------------------ MAPPED{reason}|  "" = D reads P's pool itself; else the next one is tried

    P  nccl                                         D
    | <---------------------------- JOIN{unique id} |  both are ranks of it from here on, or fail to be
    |  JOINED{reason} --------------------------->  |
    | <----------------------------- JOINED{reason} |  "" = pieces go over it; else the next one is tried

Both know which ways both offer, in which order, and which of them a connection of this kind can go. D makes the unique
id when P has proven itself: whoever has it could join, and NCCL keeps a thread for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from kv_transfer.frames import Frame, Join, Joined, Mapped, Memory
from kv_transfer.framing import encode
from kv_transfer.handshake import Handshake, Side
from kv_transfer.link_facts import STREAM
from kv_transfer.transports.nccl_port import NCCL, RECEIVER_RANK, SENDER_RANK
from kv_transfer.transports.port import Channel, Joining, Sharing
from pdserve.errors import InvalidRequest, WorkerLost

Send = Callable[[Frame], None]


class Settling(Protocol):
    """One side of it.

    kind          the transport
    has_own_time  the time that a handshake may take starts over with it
    """

    kind: str
    has_own_time: bool

    def begin(self) -> None: ...

    def on_frame(self, frame: Frame) -> None:
        """The other's word. Raises InvalidRequest where it can't be."""
        ...

    def outcome(self) -> str | None:
        """Why the transport can't be used; "" = it is; None = not known yet. Asked at each turn."""
        ...

    def settle(self, reason: str) -> None:
        """This is what it comes to."""
        ...


def settlings(
    channel: Channel, handshake: Handshake, generation: int, num_bytes: int, send: Send
) -> Iterator[Settling]:
    """What it takes to go each way that both offer and the connection can, up to the stream, which takes nothing.

    num_bytes  of P's memory
    """
    sharing, joining = channel.sharing, channel.joining
    for transport in handshake.transports:
        if transport == STREAM:
            return
        if sharing is not None and transport == sharing.kind:
            yield _Passing(sharing, handshake.side, generation, num_bytes, send)
        elif joining is not None and transport == NCCL:
            yield _Joining(joining, handshake.side, send)


class _Passing:
    """P's memory is passed to D."""

    has_own_time = False

    def __init__(self, sharing: Sharing, side: Side, generation: int, num_bytes: int, send: Send) -> None:
        self.kind = sharing.kind
        self._reason: str | None = None
        self._sharing = sharing
        self._side = side
        self._generation = generation
        self._num_bytes = num_bytes
        self._send = send

    def begin(self) -> None:
        if self._side is Side.DECODE:
            self._sharing.expect_memory()
        else:
            self._sharing.pass_memory(encode(Memory.of(self._sharing.export()), self._generation))

    def on_frame(self, frame: Frame) -> None:
        match frame, self._side:
            case Memory(), Side.DECODE:
                try:
                    self._sharing.take_memory(frame.handle or b"", self._num_bytes)
                    self._reason = ""
                except (InvalidRequest, WorkerLost) as error:
                    self._reason = str(error)
            case Mapped(), Side.PREFILL:
                self._reason = frame.reason
            case _:
                raise _out_of_order(frame)

    def outcome(self) -> str | None:
        return self._reason

    def settle(self, reason: str) -> None:
        if self._side is Side.DECODE:
            self._send(Mapped(reason))
        elif not reason:
            self._sharing.begin()


class _Joining:
    """Both become ranks of a communicator. P tells D what became of it there, and takes D's word."""

    kind = NCCL
    has_own_time = True

    def __init__(self, joining: Joining, side: Side, send: Send) -> None:
        self._joining = joining
        self._side = side
        self._send = send
        self._has_joined = False
        self._mine: str | None = None
        self._theirs: str | None = None

    def begin(self) -> None:
        if self._side is Side.PREFILL:
            return
        try:
            unique_id = self._joining.make_id()
        except WorkerLost as error:
            self._mine = str(error)
            return
        self._joining.join(unique_id, RECEIVER_RANK)
        self._send(Join(unique_id))

    def on_frame(self, frame: Frame) -> None:
        match frame, self._side:
            case Join(), Side.PREFILL:
                if not self._has_joined:
                    self._has_joined = True
                    self._joining.join(frame.unique_id, SENDER_RANK)
            case Joined(), _:
                self._theirs = frame.reason
            case (Memory(), Side.DECODE) | (Mapped(), Side.PREFILL):
                pass  # once more, of a way that was tried before
            case _:
                raise _out_of_order(frame)

    def outcome(self) -> str | None:
        if self._mine is None:
            self._mine = self._joining.outcome()
            if self._mine is not None and self._side is Side.PREFILL:
                self._send(Joined(self._mine))
        if self._mine and self._side is Side.DECODE:
            return self._mine
        return self._theirs if self._theirs or self._mine == "" else None

    def settle(self, reason: str) -> None:
        if self._side is Side.DECODE:
            self._send(Joined(reason))
        if reason:
            self._joining.leave()
        else:
            self._joining.use()


def _out_of_order(frame: Frame) -> InvalidRequest:
    return InvalidRequest("out of the handshake's order", field="kind", got=frame.kind.name)
