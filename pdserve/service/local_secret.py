"""The secret that `pdserve up` draws for its own cluster, in a file that only this user may read.

Operators' commands on the same machine find it by the port of the workers' listener.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from pdserve.ids import Random
from pdserve.service.private_folder import default_private_folder, make_private
from pdserve.service.secret import MIN_SECRET_BYTES

_PREFIX = "secret."


def local_secret_file(port: int) -> Path:
    """Where it lies, if a cluster of this user has its workers' listener at this port."""
    return default_private_folder() / f"{_PREFIX}{port}"


@contextlib.contextmanager
def drawn_secret(port: int, random: Random) -> Iterator[Path]:
    """A file with a new secret, for the block. Raises InvalidRequest if its folder isn't private, OSError."""
    path = local_secret_file(port)
    make_private(path.parent, "secrets")
    _remove_stale(path.parent)
    # It gets its name when it is locked, so that no other `up` that is starting takes it for a dead one's.
    scratch = path.with_name(f"new.{os.getpid()}.{port}")
    scratch.unlink(missing_ok=True)
    with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(f"{random.getrandbits(8 * MIN_SECRET_BYTES):0{2 * MIN_SECRET_BYTES}x}\n")
        file.flush()
        scratch.replace(path)
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)


def _remove_stale(folder: Path) -> None:
    """What killed processes left behind: nobody holds its lock."""
    for path in sorted(folder.glob(f"{_PREFIX}*")):
        with contextlib.suppress(OSError), path.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
