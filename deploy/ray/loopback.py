"""Whether a Ray cluster listens on loopback only. Knows no Ray: it must be known before that is imported."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

from pdserve.errors import InvalidRequest
from pdserve.service.address import is_loopback, split_address

_FLAG = b"--gcs-address="  # of the processes of a Ray node, by which Ray too finds what "auto" stands for
_ANY_ROUTE = ("192.0.2.1", 9)  # nothing is sent there
_CONNECT_S = 2.0


def is_on_loopback(
    address: str, environ: Mapping[str, str] = os.environ, processes: Path = Path("/proc")
) -> bool:
    """Whether the Ray at `address`, as the command line has it, is one that no other machine reaches.

    Ray takes 127.0.0.1 for the machine's own address elsewhere, unless RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 is set
    when it is imported: then a Ray on loopback is found, and any other isn't.
    """
    if address == "local":
        return True
    if address == "auto":
        address = environ.get("RAY_ADDRESS") or _current(processes)
    try:
        _, port = split_address(address)
        if not is_loopback(address):
            return False
    except InvalidRequest:
        return False
    own = _own_address()
    return own is None or not _listens(own, port)


def _current(processes: Path) -> str:
    """Of the Ray that runs on this machine, "" if there is none or nobody can say."""
    for file in processes.glob("[0-9]*/cmdline"):
        try:
            arguments = file.read_bytes().split(b"\0")
        except OSError:  # it has just ended
            continue
        found = next((each for each in arguments if each.startswith(_FLAG)), None)
        if found is not None:
            return found.removeprefix(_FLAG).decode(errors="replace")
    return ""


def _own_address() -> str | None:
    """By which this machine reaches others."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect(_ANY_ROUTE)
        except OSError:
            return None
        return str(asking.getsockname()[0])


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), _CONNECT_S).close()
    except OSError:
        return False
    return True
