"""The fork server: a small process of one thread that has imported what children need, and forks them.

It never runs a job, so it answers at once; it reaps its children, so none stays a zombie and no process id is killed
that may have become another's.
"""

from __future__ import annotations

import contextlib
import gc
import os
import selectors
import signal
import socket
import traceback
from dataclasses import dataclass
from typing import NoReturn

import msgspec

from pdserve.children import child
from pdserve.children.frames import (
    MOST_PACKET_BYTES,
    Exited,
    Fork,
    Forked,
    FromServer,
    Kill,
    ServerReady,
    ToServer,
)
from pdserve.children.process_limits import die_with_parent, limit_memory
from pdserve.children.prove import byte_vocabulary

_commands: msgspec.msgpack.Decoder[ToServer] = msgspec.msgpack.Decoder(ToServer)
_LAST_WORDS = 400


@dataclass(frozen=True, slots=True)
class _Child:
    """pidfd: readable when it has ended; stderr: a file in memory that it writes to."""

    number: int
    pid: int
    pidfd: int
    stderr: int


class ForkServer:
    """control: a SOCK_SEQPACKET end; the other one is the parent's."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._children: dict[int, _Child] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)

    def serve(self) -> None:
        """Returns when the parent has closed its end; its children are killed by the end of this process."""
        self._tell(ServerReady())
        while True:
            for key, _ in self._selector.select():
                if key.data is not None:
                    self._reap(key.data)
                elif not self._obey():
                    return

    def _obey(self) -> bool:
        """One command. False: the parent has gone."""
        packet, fds, _, _ = socket.recv_fds(self._control, MOST_PACKET_BYTES, 1)
        if not packet:
            return False
        match _commands.decode(packet):
            case Fork() as order:
                self._fork(order, fds[0])
            case Kill(number):
                if number in self._children:
                    signal.pidfd_send_signal(self._children[number].pidfd, signal.SIGKILL)
        return True

    def _fork(self, order: Fork, channel: int) -> None:
        stderr = os.memfd_create("stderr")
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            _be_child(order, channel, stderr, server)
        os.close(channel)
        made = _Child(order.number, pid, os.pidfd_open(pid), stderr)
        self._children[order.number] = made
        self._selector.register(made.pidfd, selectors.EVENT_READ, made)
        self._tell(Forked(order.number, pid))

    def _reap(self, ended: _Child) -> None:
        _, status = os.waitpid(ended.pid, 0)
        self._selector.unregister(ended.pidfd)
        os.close(ended.pidfd)
        length = os.fstat(ended.stderr).st_size
        words = os.pread(ended.stderr, _LAST_WORDS, max(0, length - _LAST_WORDS))
        os.close(ended.stderr)
        del self._children[ended.number]
        ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        self._tell(Exited(ended.number, ended_by, words.decode(errors="replace")))

    def _tell(self, message: FromServer) -> None:
        self._control.send(msgspec.msgpack.encode(message))


def _be_child(order: Fork, channel: int, stderr: int, server: int) -> NoReturn:
    """In the forked process; it ends here."""
    status = 1
    try:
        die_with_parent(server)
        os.dup2(stderr, 2)
        os.dup2(channel, 3)
        os.closerange(4, 1024)  # the server's, and those of other children
        os.nice(order.niceness)
        limit_memory(order.memory_bytes)
        child.work(socket.socket(fileno=3))
        status = 0
    except BaseException:
        traceback.print_exc()  # into its file in memory: the parent reads the end of it
    finally:
        os._exit(status)


def main(control_fd: int, parent_pid: int) -> None:
    """The process. Raises ImportError if the grammar library isn't there."""
    die_with_parent(parent_pid)
    byte_vocabulary()
    gc.collect()
    gc.freeze()  # so that children share these pages
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the parent has gone
        ForkServer(socket.socket(fileno=control_fd)).serve()
