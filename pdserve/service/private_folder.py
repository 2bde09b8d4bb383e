"""A folder that only this user may enter: sockets, and secrets of clusters on this machine."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from pdserve.errors import InvalidRequest


def default_private_folder() -> Path:
    """This user's, under the system's temporary folder; it may not be there yet."""
    return Path(tempfile.gettempdir(), f"pdserve-{os.getuid()}")


def make_private(folder: str | Path, what: str) -> None:
    """Make it if it isn't there. Raises InvalidRequest if others may enter or own it, OSError if it can't be made.

    what  that it is for, as a refusal says it
    """
    os.makedirs(folder, mode=0o700, exist_ok=True)
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise InvalidRequest(
            f"the folder for {what} must be private (0700, this user's)",
            folder=str(folder),
            mode=f"{stat.S_IMODE(found.st_mode):o}",
            owner=found.st_uid,
        )
