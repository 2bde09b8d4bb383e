"""What a user writes for a model → a model folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from pdserve.errors import UnknownModel
from pdserve.modelstore.aliases import ALIASES, Alias
from pdserve.modelstore.cache import default_cache_dir, locked, model_folder, publish, remembered_sha256
from pdserve.modelstore.gguf_import import import_gguf
from pdserve.modelstore.hf_folder import check_folder


def resolve(
    name_or_path: str | Path,
    cache_dir: Path | None = None,
    *,
    aliases: Mapping[str, Alias] = ALIASES,
    environ: Mapping[str, str] = os.environ,
) -> Path:
    """The model folder of a fetched alias, a Hugging Face folder, or a .gguf file (imported once: seconds).

    A path that exists goes before an alias of that name only if it is written as a path (with a separator). Never uses
    the network. Raises UnknownModel or Incompatible in one sentence that says what to do.
    """
    text = os.fspath(name_or_path)
    cache_dir = cache_dir or default_cache_dir(environ)
    if text in aliases:
        folder = model_folder(cache_dir, aliases[text].gguf_sha256)
        if not folder.is_dir():
            raise UnknownModel(f"model {text} is not fetched yet: run `pdserve fetch {text}`")
        return folder
    path = Path(text).expanduser()
    if path.is_dir():
        check_folder(path)
        return path.resolve()
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise UnknownModel(f"{text} is a file but not a .gguf: give its folder, or a GGUF file")
        return _imported(path.resolve(), cache_dir)
    raise UnknownModel(
        f"no model {text!r}: not a known alias ({', '.join(aliases)}), and no folder or .gguf file of that name"
    )


def _imported(path: Path, cache_dir: Path) -> Path:
    digest = remembered_sha256(cache_dir, path)
    folder = model_folder(cache_dir, digest)
    if folder.is_dir():
        return folder
    with locked(cache_dir, digest) as scratch:
        if not folder.is_dir():  # else another process was faster
            import_gguf(path, scratch / "folder")
            publish(scratch / "folder", folder)
    return folder
