"""The cache folder: where it is, locks between processes, and folders that appear whole or not at all."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

# Part of each folder's name: a later version of the import writes beside what an earlier one left.
IMPORT_VERSION = 2
_CHUNK_BYTES = 1 << 20


def default_cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """`PDSERVE_CACHE_DIR`, else `pdserve` in the XDG cache folder."""
    own = environ.get("PDSERVE_CACHE_DIR")
    if own:
        return Path(own).expanduser()
    xdg = environ.get("XDG_CACHE_HOME")
    return (Path(xdg) if xdg else Path.home() / ".cache") / "pdserve"


def model_folder(cache_dir: Path, gguf_sha256: str) -> Path:
    """Where the import of the GGUF file of this checksum lies, or will lie."""
    return cache_dir / "models" / f"{gguf_sha256}-v{IMPORT_VERSION}"


@contextmanager
def locked(cache_dir: Path, key: str) -> Iterator[Path]:
    """Hold the cache's lock of this key; other processes wait. Yields an empty scratch folder.

    The lock is the kernel's (flock) and ends with its process, however that dies; what a killed holder left in the
    scratch folder is swept away by the next one.
    """
    locks = cache_dir / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    with (locks / f"{key}.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        scratch = cache_dir / "scratch" / key
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def publish(made: Path, folder: Path) -> None:
    """Move a finished folder to its place in one step; call under the lock of its key."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for path in sorted(made.iterdir()):
        _sync(path)
    _sync(made)
    made.rename(folder)
    _sync(folder.parent)


def sha256_of(path: Path, on_bytes: Callable[[int], None] = lambda num_bytes: None) -> str:
    """SHA-256 of a file in hex; `on_bytes` hears how far it has come."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            on_bytes(len(chunk))
    return digest.hexdigest()


def remembered_sha256(cache_dir: Path, path: Path) -> str:
    """SHA-256 of a file, computed once for each (path, inode, size, time of change): big files take seconds."""
    stat = path.stat()
    identity = [str(path), stat.st_ino, stat.st_size, stat.st_mtime_ns]
    name = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]
    note = cache_dir / "hashes" / name
    if note.is_file():
        known = note.read_text().strip()
        if len(known) == 64:
            return known
    digest = sha256_of(path)
    note.parent.mkdir(parents=True, exist_ok=True)
    half = note.with_suffix(f".{os.getpid()}")
    half.write_text(digest)
    half.replace(note)
    return digest


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
