"""What a worker and the processes that are its other ranks say to each other, over a socket pair each.

worker                                rank
| LoadOrder ------------------------> |  reads and packs its part
| <------------ RankLoaded | LoadFailed   |
| JoinOrder + the pool's descriptor > |  maps the pool
|            … both join the team …   |
| <---------------------------- RankJoined|  from here on nobody may map the pool to write
| a step, a step, … ----------------> |  computes; answers nothing: what it has to say goes to the team
"""

from __future__ import annotations

import os
import socket

import msgspec

from pdserve.service.config import EngineConfig, LogConfig

_LENGTH_BYTES = 4


class LoadOrder(msgspec.Struct, frozen=True, tag=True):
    """Load one part of a model; folder: where it lies, worker: whose rank it is, for the log."""

    rank: int
    size: int
    folder: str
    worker: str
    engine: EngineConfig
    log: LogConfig


class JoinOrder(msgspec.Struct, frozen=True, tag=True):
    """meeting: the file by which ranks find each other."""

    meeting: str


class RankLoaded(msgspec.Struct, frozen=True, tag=True):
    """Of pool_bytes, the pool that it will map."""

    pool_bytes: int


class LoadFailed(msgspec.Struct, frozen=True, tag=True):
    """A `Failure`, by its fields."""

    error: str
    message: str
    fields: dict[str, str]


class RankJoined(msgspec.Struct, frozen=True, tag=True):
    """The pool is mapped and the team has met."""


ToRank = LoadOrder | JoinOrder
FromRank = RankLoaded | LoadFailed | RankJoined


class RankChannel:
    """One end. One thread at a time; calls block. All raise OSError, or EOFError when the other end is closed."""

    def __init__(self, ends: socket.socket) -> None:
        self._socket = ends
        self._descriptors: list[int] = []

    def send(self, message: ToRank | FromRank, descriptor: int | None = None) -> None:
        """With an open file, if any, for the other process to have, too."""
        self.send_bytes(msgspec.msgpack.encode(message), descriptor)

    def send_bytes(self, data: bytes, descriptor: int | None = None) -> None:
        head = len(data).to_bytes(_LENGTH_BYTES, "big")
        if descriptor is not None:
            socket.send_fds(self._socket, [head], [descriptor])
        else:
            self._socket.sendall(head)
        self._socket.sendall(data)

    def receive_bytes(self) -> bytes:
        head, descriptors, _, _ = socket.recv_fds(self._socket, _LENGTH_BYTES, 1)
        self._descriptors += descriptors
        head += self._exactly(_LENGTH_BYTES - len(head)) if head else b""
        if not head:
            raise EOFError("the other end is closed")
        return self._exactly(int.from_bytes(head, "big"))

    def taken_descriptor(self) -> int:
        """The file that came with the last message; the caller's from now on. Raises EOFError if none did."""
        if not self._descriptors:
            raise EOFError("no file came with the message")
        return self._descriptors.pop()

    def close(self) -> None:
        self._socket.close()
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _exactly(self, num_bytes: int) -> bytes:
        received = bytearray(num_bytes)
        view = memoryview(received)
        while view:
            count = self._socket.recv_into(view)
            if not count:
                raise EOFError("the other end is closed")
            view = view[count:]
        return bytes(received)
