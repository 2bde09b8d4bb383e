"""A host's own folder on its node, which only this user may enter: configuration, secrets, the list of routers."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from pdserve.service.private_folder import make_private

_PREFIX = "ray."
_LOCK = "lock"


class NodeFolder:
    """Made for one process, removed by `remove`; what a killed host left behind, by the next host of the node."""

    def __init__(self, parent: Path, name: str) -> None:
        """name: unique among live hosts. Raises InvalidRequest if others may enter the parent folder, OSError."""
        make_private(parent, "hosts")
        _remove_stale(parent)
        self._path = parent / f"{_PREFIX}{name}"
        make_private(self._path, "a host")
        self._lock: IO[bytes] = (self._path / _LOCK).open("wb")
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def write(self, name: str, content: bytes) -> Path:
        """A file that only this user may read, replaced in one step; its path."""
        path, scratch = self._path / name, self._path / f"{name}.new"
        scratch.unlink(missing_ok=True)
        with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
        scratch.replace(path)
        return path

    def write_routers(self, addresses: Sequence[str]) -> Path:
        """The list of routers that the worker reads again and again."""
        return self.write("routers", "".join(f"{address}\n" for address in addresses).encode())

    def remove(self) -> None:
        """With everything in it; idempotent."""
        shutil.rmtree(self._path, ignore_errors=True)
        self._lock.close()


def _remove_stale(parent: Path) -> None:
    """Folders whose host is dead: nobody holds their lock."""
    for path in sorted(parent.glob(f"{_PREFIX}*")):
        with contextlib.suppress(OSError), (path / _LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
