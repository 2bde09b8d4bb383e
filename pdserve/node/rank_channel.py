"""What a worker and the processes that are its other ranks say to each other, over a socket pair each.

worker                                    rank
| LoadOrder ----------------------------> |  reads and packs its part
| <------------- RankLoaded | LoadFailed  |
| JoinOrder + descriptors --------------> |  on a CPU: maps the pool
|              … both join the team …     |
| <------------- RankJoined | LoadFailed  |  on a device: with its own pool. On a CPU nobody can map the pool to
|                                         |  write from here on
| a step, a step, … --------------------> |  computes; answers nothing: what it has to say goes to the team
| <------------------- a byte each second |  from a thread of its own: it doesn't stand still, whatever it computes
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections.abc import Iterator, Sequence

import msgspec

from pdserve.service.config import EngineConfig, LogConfig

_LENGTH_BYTES = 4
_MOST_DESCRIPTORS = 2
_MOST_PULSES = 4096
PULSE_S = 1.0


class LoadOrder(msgspec.Struct, frozen=True, tag=True):
    """Load one part of a model; folder: where it lies, worker: whose rank it is, for the log."""

    rank: int
    size: int
    folder: str
    worker: str
    engine: EngineConfig
    log: LogConfig


class JoinOrder(msgspec.Struct, frozen=True, tag=True):
    """Descriptors come with it: the file by which ranks find each other, and on CPUs the pool."""


class RankLoaded(msgspec.Struct, frozen=True, tag=True):
    """kv_bytes: of the pool that it will map; on a device, of a whole block. The same at all ranks."""

    kv_bytes: int


class LoadFailed(msgspec.Struct, frozen=True, tag=True):
    """A `Failure`, by its fields."""

    error: str
    message: str
    fields: dict[str, str]


class RankPool(msgspec.Struct, frozen=True):
    """A rank's own pool on its device; handle: CUDA's, empty if a descriptor comes with it instead."""

    num_bytes: int
    device: str
    handle: bytes


class RankJoined(msgspec.Struct, frozen=True, tag=True):
    """Ready for steps. gpus: as in `ModelCard`."""

    pool: RankPool | None = None
    gpus: tuple[int, ...] = ()


ToRank = LoadOrder | JoinOrder
FromRank = RankLoaded | LoadFailed | RankJoined


class RankChannel:
    """One end. One thread at a time for each direction; calls block, but for `pulse` and `was_heard`.

    All raise OSError, or EOFError when the other end is closed.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._descriptors: list[int] = []

    def send(self, message: ToRank | FromRank, descriptors: Sequence[int] = ()) -> None:
        """With open files, if any, for the other process to have, too."""
        self.send_bytes(msgspec.msgpack.encode(message), descriptors)

    def send_bytes(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        length = len(data).to_bytes(_LENGTH_BYTES, "big")
        if descriptors:  # a few bytes always find room at once
            socket.send_fds(self._socket, [length], descriptors)
        else:
            self._socket.sendall(length)
        self._socket.sendall(data)

    def receive_bytes(self) -> bytes:
        head, descriptors, _, _ = socket.recv_fds(self._socket, _LENGTH_BYTES, _MOST_DESCRIPTORS)
        self._descriptors += descriptors
        if not head:
            raise EOFError("the other end is closed")
        head += self._exactly(_LENGTH_BYTES - len(head))
        return self._exactly(int.from_bytes(head, "big"))

    def has_something(self, limit_s: float) -> bool:
        """Whether there is something to receive within so long; the other end's being closed is something."""
        return bool(select.select([self._socket], [], [], limit_s)[0])

    def pulse(self) -> None:
        """Say that this end goes on. From now on nothing else is sent."""
        with contextlib.suppress(BlockingIOError):  # many are unheard
            self._socket.send(b"\0", socket.MSG_DONTWAIT)

    def was_heard(self) -> bool:
        """Whether the other end has pulsed since it was asked last."""
        try:
            return bool(self._socket.recv(_MOST_PULSES, socket.MSG_DONTWAIT))
        except OSError:  # nothing came; or it is closed, which the end of the process says
            return False

    @contextlib.contextmanager
    def limited(self, limit_s: float) -> Iterator[None]:
        """In the block a wait that takes longer raises TimeoutError, an OSError."""
        self._socket.settimeout(limit_s)
        try:
            yield
        finally:
            self._socket.settimeout(None)

    def taken_descriptors(self) -> list[int]:
        """The files that came with the last message; the caller's from now on."""
        taken, self._descriptors = self._descriptors, []
        return taken

    def close(self) -> None:
        self._socket.close()
        for descriptor in self.taken_descriptors():
            os.close(descriptor)

    def _exactly(self, num_bytes: int) -> bytes:
        received = bytearray(num_bytes)
        view = memoryview(received)
        while view:
            count = self._socket.recv_into(view)
            if not count:
                raise EOFError("the other end is closed")
            view = view[count:]
        return bytes(received)
