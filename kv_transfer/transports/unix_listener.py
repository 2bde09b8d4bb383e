"""The Unix socket of a worker: a file with a drawn name in a folder that only its user may enter."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Self

import structlog

from kv_transfer.transports.stream_dial import UNIX_SCHEME
from pdserve.ids import Random
from pdserve.service.private_folder import default_private_folder, make_private

_BACKLOG = 64
_MAX_PATH_BYTES = 100
"""Of the 108 that the system allows."""

log = structlog.get_logger()


class UnixListener:
    """Made by `open`. The file is removed by `close`; what a killed process left is removed by the next `open`."""

    def __init__(self, sock: socket.socket, path: str, nonce: str) -> None:
        self.sock = sock
        self.path = path
        self.nonce = nonce

    @property
    def address(self) -> str:
        return UNIX_SCHEME + self.path

    @classmethod
    def open(cls, unix_dir: str, random: Random) -> Self | None:
        """Listen in this folder ("" = this user's own under the system's temporary one); None, logged, if it can't be.

        Raises InvalidRequest if the folder isn't private.
        """
        folder = unix_dir or str(default_private_folder())
        nonce = f"{random.getrandbits(64):016x}"
        path = os.path.join(folder, f"kv.{nonce}.sock")
        if len(path.encode()) > _MAX_PATH_BYTES:
            log.warning("link.no_unix_socket", reason="path too long", path=path)
            return None
        try:
            make_private(folder, "Unix sockets")
            _remove_stale(folder)
            return cls(_listen(path), path, nonce)
        except OSError as error:
            log.warning("link.no_unix_socket", reason=error.strerror, path=path)
            return None

    def close(self) -> None:
        self.sock.close()
        with contextlib.suppress(FileNotFoundError):  # somebody tidied up before us
            os.unlink(self.path)


def _listen(path: str) -> socket.socket:
    """The name appears only when the socket listens, so a file that refuses connections is a dead process's."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    new = path.removesuffix(".sock") + ".new"
    try:
        sock.bind(new)
        sock.listen(_BACKLOG)
        sock.setblocking(False)
        os.rename(new, path)
    except OSError:
        sock.close()
        raise
    return sock


def _remove_stale(folder: str) -> None:
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        if not name.startswith("kv.") or not name.endswith(".sock") or not _is_refused(path):
            continue
        try:
            os.unlink(path)
        except FileNotFoundError:
            continue  # another starting worker was faster
        log.info("link.stale_socket_removed", path=path)


def _is_refused(path: str) -> bool:
    """Whether nobody listens behind this file."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False
