"""What a model folder's weights files hold, by their heads alone, and whether the files are whole."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdserve.errors import Incompatible
from pdserve.modelstore.gguf_types import SUPPORTED

SAFETENSORS_INDEX = "model.safetensors.index.json"
_MOST_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a weights file; shape in torch order."""

    type: str
    shape: tuple[int, ...]
    num_bytes: int
    file: str


def read_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a checked model folder (see `resolve`), by name.

    Raises Incompatible in one line that names file and tensor: a file that is no safetensors file or is cut short, a
    tensor that the index promises and its shard lacks, bytes that don't fit a shape, a type that can't be decoded.
    """
    if (folder / "tensors.json").is_file():
        return dict(_of_gguf(folder))
    index_path = folder / SAFETENSORS_INDEX
    if not index_path.is_file():
        return {
            name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in _of_shard(path)
        }
    promised = json.loads(index_path.read_text(encoding="utf-8"))["weight_map"]
    found: dict[str, StoredTensor] = {}
    for shard in dict.fromkeys(promised.values()):
        found.update(_of_shard(folder / str(shard)))
    for name, shard in promised.items():
        if name not in found or found[name].file != shard:
            raise Incompatible(
                "a shard lacks a tensor that the index promises",
                tensor=name,
                file=shard,
                named_by=index_path.name,
            )
    return found


def _of_gguf(folder: Path) -> Iterator[tuple[str, StoredTensor]]:
    index = json.loads((folder / "tensors.json").read_text(encoding="utf-8"))
    file = str(index["file"])
    file_bytes = (folder / file).stat().st_size
    try:
        for name, entry in index["tensors"].items():
            shape = tuple(int(size) for size in entry["shape"])
            tensor = StoredTensor(str(entry["type"]), shape, int(entry["nbytes"]), file)
            _check(name, tensor, int(entry["offset"]), file_bytes)
            yield name, tensor
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Incompatible("tensors.json is broken", folder=folder, why=repr(error)) from error


def _of_shard(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    """Source: the safetensors format: 8 bytes of length, then a JSON header; offsets count from its end."""
    file_bytes = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(_MOST_HEADER_BYTES, file_bytes - 8):
            raise Incompatible(
                "not a safetensors file, or a truncated one", file=path.name, file_bytes=file_bytes
            )
        content = file.read(length)
    try:
        header: dict[str, Any] = json.loads(content)
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = (int(offset) for offset in entry["data_offsets"])
            shape = tuple(int(size) for size in entry["shape"])
            tensor = StoredTensor(str(entry["dtype"]), shape, end - begin, path.name)
            _check(name, tensor, 8 + length + begin, file_bytes)
            yield name, tensor
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Incompatible("safetensors header is broken", file=path.name, why=error) from error


def _check(name: str, tensor: StoredTensor, offset: int, file_bytes: int) -> None:
    stored = SUPPORTED.get(tensor.type)
    if stored is None:
        raise Incompatible(
            "weights of this type are not supported",
            tensor=name,
            file=tensor.file,
            got=tensor.type,
            supported=", ".join(SUPPORTED),
        )
    want = math.prod(tensor.shape) // stored.num_values * stored.num_bytes
    if tensor.num_bytes != want:
        raise Incompatible(
            "a tensor's bytes don't fit its shape",
            tensor=name,
            file=tensor.file,
            want=want,
            got=tensor.num_bytes,
        )
    end = offset + tensor.num_bytes
    if not 0 <= offset <= end <= file_bytes:
        raise Incompatible(
            "a weights file is truncated",
            file=tensor.file,
            tensor=name,
            need_bytes=end,
            file_bytes=file_bytes,
        )
