"""The tokenizer of a model that lies on the router's own machine."""

from __future__ import annotations

from pathlib import Path

from pdserve.tokenizer import Tokenizer


def load_tokenizer(name_or_path: str) -> Tokenizer:
    """Of a fetched alias, a folder (its weights may be missing here), or a .gguf file, which is unpacked once.

    Blocks, for seconds at worst. Raises UnknownModel or Incompatible in one sentence that says what to do.
    """
    # Here, so that a router without a model of its own starts without them.
    from pdserve.modelstore.aliases import ALIASES
    from pdserve.modelstore.resolve import resolve

    path = Path(name_or_path).expanduser()
    folder = path if name_or_path not in ALIASES and path.is_dir() else resolve(name_or_path)
    return Tokenizer.load(folder)
