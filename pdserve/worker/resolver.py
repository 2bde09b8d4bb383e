"""Where the configured routers are now: what the system's resolver or a file says of a name."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from collections.abc import Sequence
from pathlib import Path

from pdserve.errors import InvalidRequest, WorkerLost
from pdserve.service.address import file_of, join_address, split_address

_MAX_FILE_BYTES = 1 << 20


class RouterResolver:
    """HOST:PORT by the system's resolver, file:///PATH by what is in that file; see `Resolver`."""

    async def resolve(self, name: str) -> Sequence[str]:
        """Raises WorkerLost when the name is unknown, or the file names no routers."""
        path = file_of(name)
        if path is not None:
            return await asyncio.to_thread(read_addresses, path)
        return await _look_up(name)


async def _look_up(name: str) -> Sequence[str]:
    """A name may stand for several routers; the addresses of one family only, IPv4 if there are any, so that no
    router is dialled twice."""
    host, port = split_address(name)
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # the latter: it can't be a name at all
        reason = error.strerror if isinstance(error, OSError) else "not a name"
        raise WorkerLost("the router's name is unknown", name=name, error=reason) from error
    of_family = [entry for entry in found if entry[0] == socket.AF_INET] or found
    return sorted({join_address(str(entry[4][0]), port): None for entry in of_family})


def read_addresses(path: Path) -> Sequence[str]:
    """The routers that a file names: HOST:PORT, one a line; blank lines and what follows a # don't count.

    Whoever changes the file should replace it in one step (rename). Raises WorkerLost if it names none or isn't
    wholly of this form.
    """
    try:
        text = _read(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it isn't UTF-8 text"
        raise WorkerLost("the file of routers can't be read", file=path, error=reason) from error
    addresses: dict[str, None] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        address = line.partition("#")[0].strip()
        if address:
            try:
                addresses[join_address(*split_address(address))] = None
            except InvalidRequest as error:
                raise WorkerLost(
                    "the file of routers has a line that is not HOST:PORT", file=path, line=number
                ) from error
    if not addresses:
        raise WorkerLost("the file of routers is empty", file=path)
    return tuple(addresses)


def _read(path: Path) -> str:
    # Not blocking: a FIFO would otherwise wait here for a writer.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(0, "it isn't a regular file")
        raw = file.read(_MAX_FILE_BYTES + 1)
    if len(raw) > _MAX_FILE_BYTES:
        raise OSError(0, f"it is longer than {_MAX_FILE_BYTES} bytes")
    return raw.decode("utf-8-sig")
