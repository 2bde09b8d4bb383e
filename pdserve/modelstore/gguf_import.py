"""A GGUF file becomes a model folder, once."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

from pdserve.modelstore.expected_tensors import check_tensors
from pdserve.modelstore.gguf_config import generation_config, model_config
from pdserve.modelstore.gguf_file import read_gguf
from pdserve.modelstore.gguf_tensors import tensor_index

WEIGHTS_NAME = "weights.gguf"
# Templates beside the default one, by name: where transformers keeps them, too.
TEMPLATES = "additional_chat_templates"


def import_gguf(source: Path, folder: Path) -> None:
    """Write the model folder of a GGUF file into `folder`, which must not exist yet.

    The weights are a hard link where the file system allows, else a copy. Raises Incompatible for what isn't supported.
    """
    # Here, so that commands that only look a model up don't load the tokenizers package.
    from pdserve.modelstore.gguf_tokenizer import named_templates, tokenizer_config, tokenizer_json

    file = read_gguf(source)
    # Everything that may refuse comes before the first byte is written.
    config = model_config(file)
    index = tensor_index(file, config["architectures"][0], WEIGHTS_NAME)
    check_tensors(
        config, {name: tuple(entry["shape"]) for name, entry in index["tensors"].items()}, source.name
    )
    tokenizer = tokenizer_json(file)
    folder.mkdir(parents=True)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", generation_config(file))
    _write_json(folder / "tensors.json", index)
    (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    _write_json(folder / "tokenizer_config.json", tokenizer_config(file))
    template = file.typed("tokenizer.chat_template", str, "")
    if template:
        _write_exactly(folder / "chat_template.jinja", template)
    for name, template in named_templates(file).items():
        (folder / TEMPLATES).mkdir(exist_ok=True)
        _write_exactly(folder / TEMPLATES / f"{name}.jinja", template)
    link_or_copy(source, folder / WEIGHTS_NAME)


def link_or_copy(source: Path, target: Path) -> None:
    """One more name for a file; other file systems, and those without hard links, get a copy."""
    try:
        os.link(source.resolve(), target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EACCES):
            raise
        shutil.copyfile(source, target)


def _write_exactly(path: Path, text: str) -> None:
    # newline="" keeps it byte for byte
    with path.open("w", encoding="utf-8", newline="") as out:
        out.write(text)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
