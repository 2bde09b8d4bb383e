"""What a model folder's weights files hold, by their heads alone, and whether the files are whole."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdserve.modelstore.errors import BadModel
from pdserve.modelstore.gguf_types import SUPPORTED, StoredType

SAFETENSORS_INDEX = "model.safetensors.index.json"
_MOST_HEADER_BYTES = 100_000_000
# What quantised weights' codes, zero points and orders are stored as: no values by themselves.
_CODES = {
    "I8": StoredType(1, 1),
    "U8": StoredType(1, 1),
    "I32": StoredType(1, 4),
    "I64": StoredType(1, 8),
    "F8_E4M3": StoredType(1, 1),
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a weights file: bytes [offset, offset + num_bytes) of it; shape in torch order.

    transform  None, or how to undo what llama.cpp did to the values: "unpermute_q" / "unpermute_k" (row order of rotary
               pairs), "minus_one" (norms stored plus one)
    """

    type: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    file: str
    transform: str | None = None


def read_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a checked model folder (see `resolve`), by name.

    Raises BadModel in one line that names file and tensor: a file that is no safetensors file or is cut short, a
    tensor that the index promises and its shard lacks, bytes that don't fit a shape, a type that can't be decoded.
    Raises OSError for a file that can't be read.
    """
    try:
        if (folder / "tensors.json").is_file():
            return dict(_of_gguf(folder))
        if (folder / SAFETENSORS_INDEX).is_file():
            return _of_shards(folder)
        found = {
            name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in _of_shard(path)
        }
    except FileNotFoundError as error:
        raise BadModel("the model folder lacks a file", file=error.filename) from None
    if not found:
        raise BadModel("the model folder has neither *.safetensors nor tensors.json", folder=str(folder))
    return found


def _of_shards(folder: Path) -> dict[str, StoredTensor]:
    promised = json.loads((folder / SAFETENSORS_INDEX).read_text(encoding="utf-8"))["weight_map"]
    found: dict[str, StoredTensor] = {}
    for shard in dict.fromkeys(promised.values()):
        found.update(_of_shard(folder / str(shard)))
    for name, shard in promised.items():
        if name not in found or found[name].file != shard:
            raise BadModel(
                "a shard lacks a tensor that the index promises",
                tensor=name,
                file=shard,
                named_by=SAFETENSORS_INDEX,
            )
    return found


def _of_gguf(folder: Path) -> Iterator[tuple[str, StoredTensor]]:
    try:
        index = json.loads((folder / "tensors.json").read_text(encoding="utf-8"))
        file = str(index["file"])
        file_bytes = (folder / file).stat().st_size
        for name, entry in index["tensors"].items():
            shape = tuple(int(size) for size in entry["shape"])
            offset, num_bytes = int(entry["offset"]), int(entry["nbytes"])
            tensor = StoredTensor(str(entry["type"]), shape, offset, num_bytes, file, entry.get("transform"))
            _check(name, tensor, file_bytes)
            yield name, tensor
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadModel("tensors.json is broken", folder=folder, why=repr(error)) from error


def _of_shard(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    """Source: the safetensors format: 8 bytes of length, then a JSON header; offsets count from its end."""
    file_bytes = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(_MOST_HEADER_BYTES, file_bytes - 8):
            raise BadModel(
                "not a safetensors file, or a truncated one", file=path.name, file_bytes=file_bytes
            )
        content = file.read(length)
    try:
        header: dict[str, Any] = json.loads(content)
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = (int(offset) for offset in entry["data_offsets"])
            shape = tuple(int(size) for size in entry["shape"])
            tensor = StoredTensor(str(entry["dtype"]), shape, 8 + length + begin, end - begin, path.name)
            _check(name, tensor, file_bytes)
            yield name, tensor
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadModel("safetensors header is broken", file=path.name, why=error) from error


def _check(name: str, tensor: StoredTensor, file_bytes: int) -> None:
    where: dict[str, object] = {"tensor": name, "file": tensor.file}
    stored = SUPPORTED.get(tensor.type) or _CODES.get(tensor.type)
    if stored is None:
        raise BadModel(
            "weights of this type are not supported", **where, got=tensor.type, supported=", ".join(SUPPORTED)
        )
    if tensor.shape and tensor.shape[-1] % stored.num_values:
        raise BadModel(
            "a quantised row isn't whole blocks", **where, shape=tensor.shape, block=stored.num_values
        )
    want = math.prod(tensor.shape) // stored.num_values * stored.num_bytes
    if tensor.num_bytes != want:
        raise BadModel("a tensor's bytes don't fit its shape", **where, want=want, got=tensor.num_bytes)
    end = tensor.offset + tensor.num_bytes
    if not 0 <= tensor.offset <= end <= file_bytes:
        raise BadModel(
            "a weights file is truncated",
            file=tensor.file,
            tensor=name,
            need_bytes=end,
            file_bytes=file_bytes,
        )
    if tensor.transform not in (None, "unpermute_q", "unpermute_k", "minus_one"):
        raise BadModel("this transform is not known", **where, transform=tensor.transform)
