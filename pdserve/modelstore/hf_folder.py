"""Is this a model folder? One clear sentence if not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pdserve.errors import Incompatible, UnknownModel
from pdserve.modelstore.quantisation_config import read_quantisation


def check_folder(folder: Path) -> None:
    """Check that a folder holds a config, a tokenizer and all weight files that its index names.

    Raises UnknownModel if something is missing, Incompatible if something is unreadable; tensors are not looked at.
    """
    config = _read_json(
        folder / "config.json", "a Hugging Face folder or one that `pdserve fetch` made has it"
    )
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise Incompatible("config.json names no architectures", folder=folder, got=names)
    read_quantisation(config)
    if not (folder / "tokenizer.json").is_file():
        raise UnknownModel(
            "model folder has no tokenizer.json: save it with AutoTokenizer.from_pretrained(…).save_pretrained(…)",
            folder=folder,
        )
    _check_weights(folder)


def _check_weights(folder: Path) -> None:
    if (folder / "tensors.json").is_file():
        index = _read_json(folder / "tensors.json", "")
        _need_file(folder, str(index.get("file", "")), "tensors.json")
        return
    index_path = folder / "model.safetensors.index.json"
    if index_path.is_file():
        shards = _read_json(index_path, "").get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise Incompatible("model.safetensors.index.json has no weight_map", folder=folder)
        for name in dict.fromkeys(shards.values()):
            _need_file(folder, str(name), index_path.name)
        return
    if not any(folder.glob("*.safetensors")):
        other = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
        hint = f"; {other[0]} is a pickle, which is never loaded" if other else ""
        raise UnknownModel(
            f"model folder has no weights (*.safetensors, or tensors.json){hint}", folder=folder
        )


def _need_file(folder: Path, name: str, named_by: str) -> None:
    if not name or not (folder / name).is_file():
        raise UnknownModel(
            "model folder lacks a weights file", file=name or "?", named_by=named_by, folder=folder
        )


def _read_json(path: Path, hint: str) -> dict[str, Any]:
    if not path.is_file():
        raise UnknownModel(
            f"model folder has no {path.name}{f': {hint}' if hint else ''}", folder=path.parent
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise Incompatible(f"{path.name} is not JSON", folder=path.parent, why=error) from error
    if not isinstance(content, dict):
        raise Incompatible(f"{path.name} is not a JSON object", folder=path.parent)
    return content
