"""One GGUF file as plain metadata and a table of its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdserve.errors import Incompatible


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor's bytes lie.

    shape   torch order: rows first (GGUF itself writes the fastest dimension first)
    offset  bytes from the start of the file
    """

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """Metadata (key → str, int, float, bool or a list of them) and tensors of a GGUF file."""

    path: Path
    metadata: dict[str, Any]
    tensors: tuple[GgufTensor, ...]

    def architecture(self) -> str:
        """`general.architecture`, the prefix of the model's own keys."""
        return str(self.need("general.architecture"))

    def need(self, key: str) -> Any:
        """A metadata value. Raises Incompatible if the file lacks it."""
        if key not in self.metadata:
            raise Incompatible("GGUF metadata key is missing", file=self.path.name, key=key)
        return self.metadata[key]

    def own(self, key: str, default: Any = None) -> Any:
        """A value under the architecture's prefix."""
        return self.metadata.get(f"{self.architecture()}.{key}", default)

    def need_own(self, key: str) -> Any:
        """A value under the architecture's prefix. Raises Incompatible if the file lacks it."""
        return self.need(f"{self.architecture()}.{key}")


def read_gguf(path: Path) -> GgufFile:
    """Read a GGUF file's head; tensor bytes are not touched.

    Takes seconds for big vocabularies (the `gguf` package parses token by token), hence once per file.
    Raises Incompatible for what isn't a whole, little-endian GGUF file.
    """
    from gguf import GGUFEndian, GGUFReader

    try:
        reader = GGUFReader(path)
        # Keys of the reader itself (GGUF.version …) carry no model facts.
        metadata = {
            name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")
        }
    except (ValueError, IndexError, KeyError, UnicodeDecodeError, OverflowError) as error:
        raise Incompatible("not a readable GGUF file", file=path.name, why=_one_line(error)) from error
    if reader.endianess != GGUFEndian.LITTLE:
        raise Incompatible("GGUF file of another byte order", file=path.name, want="little", got="big")
    file_bytes = path.stat().st_size
    tensors = []
    for tensor in reader.tensors:
        found = GgufTensor(
            name=tensor.name,
            type=tensor.tensor_type.name,
            shape=tuple(int(size) for size in reversed(tensor.shape.tolist())),
            offset=int(tensor.data_offset),
            num_bytes=int(tensor.n_bytes),
        )
        if found.offset + found.num_bytes > file_bytes:
            raise Incompatible(
                "GGUF file is cut short", file=path.name, tensor=found.name, file_bytes=file_bytes
            )
        tensors.append(found)
    return GgufFile(path, metadata, tuple(tensors))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
