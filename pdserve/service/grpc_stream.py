"""One end of a session over one bidirectional gRPC stream.

A writer drains the outbox and a reader fills the inbox; when the inbox is full the reader stops, and HTTP/2's flow
control holds the other side back, whose outbox then fills up to its bound.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

import grpc.aio
import structlog

from pdserve.errors import Incompatible, PdserveError
from pdserve.service.inbox import Inbox
from pdserve.service.outbox import DEFAULT_LIMIT, Outbox
from pdserve.service.rpc import EOF
from pdserve.service.rpc_errors import error_of

S = TypeVar("S")
R = TypeVar("R")

# How long a closed end still tries to deliver what it had queued: so long after anything has moved, at most so long. A
# dead other side is noticed by gRPC's pings; one that is only slow reads on, and its heartbeats say that it lives.
LINGER_S, MOST_LINGER_S = 1.0, 30.0

log = structlog.get_logger()


class GrpcStream(Generic[S, R]):
    """One end; see `pdserve.session.Session`. `run` moves its messages until the session has ended.

    decode  gives None for a message to be skipped
    """

    def __init__(
        self,
        peer: str,
        encode: Callable[[S], Any],
        decode: Callable[[Any], R | None],
        outbox_limit: int = DEFAULT_LIMIT,
    ) -> None:
        self._peer = peer
        self._encode = encode
        self._decode = decode
        self._outbox: Outbox[S] = Outbox(outbox_limit)
        self._room = asyncio.Event()
        self._inbox: Inbox[R] = Inbox(peer, self._room.set)
        self._work = asyncio.Event()
        self._over = asyncio.Event()
        self._idle: Callable[[], S | None] = _nothing
        self._moved_s = 0.0
        self.lingers = True
        self.close_reason: str | None = None
        self.refusal: PdserveError | None = None

    @property
    def peer(self) -> str:
        return self._peer

    @property
    def ended(self) -> bool:
        """Whether this end was closed, or has learned that the other was."""
        return self._over.is_set()

    def send(self, message: S) -> None:
        if self.ended:
            return
        if self._outbox.put(message):
            self._work.set()
            return
        log.warning("session.slow_consumer", peer=self._peer, num_waiting=self._outbox.size)
        self.lingers = False
        self.close("slow consumer")

    def when_idle(self, source: Callable[[], S | None]) -> Callable[[], None]:
        self._idle = source
        self._work.set()
        return self._work.set

    async def receive(self) -> R:
        return await self._inbox.get()

    def close(self, reason: str) -> None:
        if self.ended:
            return
        self.close_reason = reason
        self._inbox.discard(reason)
        self._over.set()
        self._work.set()

    def refuse(self, error: PdserveError) -> None:
        if not self.ended:
            self.refusal = error
            self.close(str(error))

    def end(self, reason: str, misfit: Incompatible | None = None) -> None:
        """The other side is gone: what has arrived can still be read."""
        self.lingers = False
        self._inbox.end(reason, misfit)
        self._over.set()
        self._work.set()

    def crash(self, bug: Exception) -> None:
        """A bug of this process has broken the session: whoever reads it gets the bug."""
        self.lingers = False
        self._inbox.crash(bug)
        self._over.set()
        self._work.set()

    async def run(
        self,
        read: Callable[[], Awaitable[Any]],
        write: Callable[[Any], Awaitable[None]],
        half_close: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Read and write until either side has ended the session; what was queued by then still goes, for a while.

        read        returns EOF at the end; it and `write` may raise what gRPC raises when a call breaks
        half_close  a client's way to say that no more comes. The other side then ends the call when it has read all:
                    a client that cancels a read, or the call, takes back what it has written and wasn't read yet
        """
        async with asyncio.TaskGroup() as tasks:
            reader = tasks.create_task(self._read(read))
            writer = tasks.create_task(self._write(write, half_close))
            await self._over.wait()
            ends_at_s = asyncio.get_running_loop().time() + MOST_LINGER_S
            await self._linger(writer, ends_at_s)
            if half_close is not None:
                await self._linger(reader, ends_at_s)
            reader.cancel()
            writer.cancel()
        self._outbox.clear()

    async def _linger(self, task: asyncio.Task[None], ends_at_s: float) -> None:
        """Until it has ended, nothing has moved for LINGER_S, or it is so late."""
        loop = asyncio.get_running_loop()
        self._moved_s = loop.time()
        while self.lingers and not task.done():
            left_s = min(self._moved_s + LINGER_S, ends_at_s) - loop.time()
            if left_s <= 0:
                return
            await asyncio.wait([task], timeout=left_s)

    async def _read(self, read: Callable[[], Awaitable[Any]]) -> None:
        try:
            while True:
                while self._inbox.full:
                    self._room.clear()
                    await self._room.wait()
                msg = await read()
                if msg is EOF:
                    self.end("ended by the other side")
                    return
                self._moved_s = asyncio.get_running_loop().time()
                message = self._decode(msg)
                if message is not None:
                    self._inbox.put(message)
        except grpc.aio.AioRpcError as error:
            told = error_of(error, self._peer)
            self.end(error.details() or error.code().name, told if isinstance(told, Incompatible) else None)
        except (grpc.aio.BaseError, asyncio.InvalidStateError):  # how gRPC says that the call is over
            self.end("connection lost")
        except PdserveError as error:
            log.error("session.bad_message", peer=self._peer, error=str(error))
            self.close(f"bad message: {error}")

    async def _write(
        self, write: Callable[[Any], Awaitable[None]], half_close: Callable[[], Awaitable[None]] | None
    ) -> None:
        try:
            while True:
                message = self._outbox.take()
                if message is None and not self._over.is_set():
                    message = self._idle()
                if message is not None:
                    await write(self._encode(message))
                    self._moved_s = asyncio.get_running_loop().time()
                elif self._over.is_set():
                    if half_close is not None and self.lingers:
                        await half_close()
                    return
                else:
                    self._work.clear()
                    await self._work.wait()
        except (grpc.aio.AioRpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
            return  # the call is over; the reader is told why


def _nothing() -> None:
    """The source of a session that has only what is sent."""
