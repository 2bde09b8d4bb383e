"""The parent's end of the fork server: starts it, asks it for children, hears of their ends."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
import structlog

import pdserve
from pdserve.children.frames import (
    LENGTH_BYTES,
    MOST_FRAME_BYTES,
    MOST_PACKET_BYTES,
    Exited,
    Fork,
    Forked,
    FromServer,
    JobAnswer,
    JobOrder,
    Kill,
    ServerReady,
    ToServer,
    frame,
)
from pdserve.clock import Clock
from pdserve.errors import Incompatible

log = structlog.get_logger()

_RETRY_S = 5.0  # between two starts of a server that doesn't start
_answers = msgspec.msgpack.Decoder(JobAnswer)
_messages: msgspec.msgpack.Decoder[FromServer] = msgspec.msgpack.Decoder(FromServer)
# Nothing else of the environment is foreign code's business: it may hold keys.
_KEPT_VARIABLES = (
    "HOME",
    "LANG",
    "LC_ALL",
    "LC_TIME",
    "LD_LIBRARY_PATH",
    "PATH",
    "PYTHONHOME",
    "TMPDIR",
    "TZ",
)


class ChildLost(Exception):
    """The child has ended before its answer. exited: how; None = the fork server ended too."""

    def __init__(self, exited: Exited | None) -> None:
        super().__init__("child lost")
        self.exited = exited


class ForeignChild:
    """One child as its parent sees it. Jobs may be sent at once, though the fork is still to come. Event loop only."""

    def __init__(self, number: int, channel: socket.socket, server: ServerProcess) -> None:
        self.number = number
        self.pid = 0  # known once it has been forked
        self.exited: asyncio.Future[Exited | None] = asyncio.get_running_loop().create_future()
        self._channel = channel
        self._server = server

    async def ask(self, order: JobOrder) -> JobAnswer:
        """Have one job done. Raises ChildLost; cancelled, the child must be killed."""
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_sendall(self._channel, frame(order))
            length = int.from_bytes(await self._read(LENGTH_BYTES), "big")
            if length > MOST_FRAME_BYTES:
                raise ConnectionError("no answer of a child is so long")
            return _answers.decode(await self._read(length))
        except (OSError, EOFError, msgspec.MsgspecError):
            self.kill()
            raise ChildLost(await asyncio.shield(self.exited)) from None

    @property
    def cpu_s(self) -> float:
        """What it has computed so far, as the kernel counts it for others; 0 while it is still to be forked."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def kill(self) -> None:
        """End it now; `exited` says when."""
        self._server.tell(Kill(self.number))

    def close(self) -> None:
        """Let go of it: an idle child ends by itself."""
        self._channel.close()

    async def _read(self, num_bytes: int) -> bytes:
        loop = asyncio.get_running_loop()
        received = bytearray()
        while len(received) < num_bytes:
            part = await loop.sock_recv(self._channel, min(num_bytes - len(received), 1 << 20))
            if not part:
                raise EOFError
            received += part
        return bytes(received)


class ServerProcess:
    """Starts when the first child is wanted, and again if it ended. Event loop only.

    It must be made on the thread that lives as long as the process: the kernel kills what a thread started with it.
    """

    def __init__(self, clock: Clock, environ: Mapping[str, str]) -> None:
        self._clock = clock
        self._environ = environ
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._ready: asyncio.Future[bool] | None = None
        self._children: dict[int, ForeignChild] = {}
        self._num_children = 0
        self._next_start_s = 0.0
        self._closed = False

    @property
    def pid(self) -> int:
        """0 = it doesn't run."""
        return 0 if self._process is None else self._process.pid

    def fork(self, memory_bytes: int, niceness: int) -> ForeignChild:
        """A new child. Raises Incompatible if there is no fork server now."""
        self._start()
        assert self._control is not None, "started"
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self._num_children += 1
        child = ForeignChild(self._num_children, ours, self)
        self._children[child.number] = child
        packet = msgspec.msgpack.encode(Fork(child.number, memory_bytes, niceness))
        try:
            socket.send_fds(self._control, [packet], [theirs.fileno()])
        except OSError:
            self._ended()
        finally:
            theirs.close()
        return child

    async def ready(self) -> None:
        """Wait until it has imported all that children need. Raises Incompatible if it can't."""
        self._start()
        assert self._ready is not None, "started"
        if not await asyncio.shield(self._ready):
            raise Incompatible("the process that forks compilers doesn't start: its standard error says why")

    def tell(self, message: ToServer) -> None:
        """Give it a command, if it is still there: else its children have ended, too."""
        if self._control is not None:
            try:
                self._control.send(msgspec.msgpack.encode(message))
            except OSError:
                self._ended()

    def close(self) -> None:
        """End it, and all children, for good."""
        self._closed = True
        self._ended()

    def _start(self) -> None:
        if self._control is not None:
            return
        if self._closed or self._clock.now_s() < self._next_start_s:
            raise Incompatible("the process that forks compilers has ended", retry_after_s=_RETRY_S)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "pdserve.children", str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=_environ_of_children(self._environ),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C in a terminal is the parent's to obey
            )
        self._control = ours
        self._ready = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(ours.fileno(), self._on_readable)
        log.debug("children.started", pid=self._process.pid)

    def _on_readable(self) -> None:
        assert self._control is not None, "read only while it is open"
        try:
            packet = self._control.recv(MOST_PACKET_BYTES)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if not packet:
            log.error("children.server_ended", pid=self.pid)
            self._next_start_s = self._clock.now_s() + _RETRY_S if not self._is_ready else 0.0
            self._ended()
            return
        self._take(_messages.decode(packet))

    def _take(self, message: FromServer) -> None:
        match message:
            case ServerReady():
                assert self._ready is not None, "started"
                self._ready.set_result(True)
            case Forked(number, pid):
                self._children[number].pid = pid
            case Exited(number=number):
                child = self._children.pop(number)
                child.exited.set_result(message)
                child.close()

    @property
    def _is_ready(self) -> bool:
        return self._ready is not None and self._ready.done() and self._ready.result()

    def _ended(self) -> None:
        if self._control is None or self._process is None or self._ready is None:
            return
        asyncio.get_running_loop().remove_reader(self._control.fileno())
        self._control.close()
        self._control = None
        self._process.kill()
        self._process.wait()  # it has ended, or does now: the signal can't be refused
        if not self._ready.done():
            self._ready.set_result(False)
        children, self._children = self._children, {}
        for child in children.values():
            child.exited.set_result(None)
            child.close()


def _environ_of_children(environ: Mapping[str, str]) -> dict[str, str]:
    root = str(Path(pdserve.__file__).resolve().parents[1])
    paths = [root, *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        **{name: environ[name] for name in _KEPT_VARIABLES if name in environ},
        "PYTHONPATH": os.pathsep.join(paths),
        "OPENBLAS_NUM_THREADS": "1",  # a process that forks has one thread
    }
