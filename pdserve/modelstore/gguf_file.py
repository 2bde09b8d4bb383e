"""One GGUF file as plain metadata and a table of its tensors.

The head is parsed here and not by the `gguf` package, which takes seconds for a big vocabulary (9 s for 262,144 tokens
against 0.4 s) and keeps each value as an array of its own.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pdserve.errors import Incompatible
from pdserve.modelstore.gguf_types import SUPPORTED, TYPE_NAMES

T = TypeVar("T")
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY, _BOOL = 8, 9, 7
# Value type → struct code.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MOST_DIMENSIONS = 4


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
    tensors: dict[str, GgufTensor]

    def architecture(self) -> str:
        """`general.architecture`, the prefix of the model's own keys."""
        return self.typed("general.architecture", str)

    def typed(self, key: str, kind: type[T], default: T | None = None) -> T:
        """A metadata value of a kind. Raises Incompatible for another kind, and if it is missing without a default."""
        value = self.metadata.get(key, default)
        if value is None:
            raise Incompatible("GGUF metadata key is missing", file=self.path.name, key=key)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise Incompatible(
                "GGUF metadata value has the wrong type",
                file=self.path.name,
                key=key,
                want=kind.__name__,
                got=type(value).__name__,
            )
        return value

    def listed(self, key: str, kind: type[T], default: list[T] | None = None) -> list[T]:
        """A list of such values."""
        values = self.typed(key, list, default)
        if not all(isinstance(value, kind) for value in values):
            raise Incompatible(
                "GGUF metadata list has the wrong type", file=self.path.name, key=key, want=kind.__name__
            )
        return values

    def key(self, name: str) -> str:
        """A name under the architecture's prefix."""
        return f"{self.architecture()}.{name}"

    def tokens(self) -> list[str]:
        """The vocabulary."""
        return self.listed("tokenizer.ggml.tokens", str)

    def token_id(self, name: str) -> int | None:
        """The id of a named token, e.g. `bos`, or None. Raises Incompatible for one outside the vocabulary."""
        key = f"tokenizer.ggml.{name}_token_id"
        if key not in self.metadata:
            return None
        return self._in_vocabulary(key, self.typed(key, int))

    def token_ids(self, name: str) -> list[int]:
        """The ids of several tokens with one meaning, e.g. `eos`. Raises as `token_id`."""
        key = f"tokenizer.ggml.{name}_token_ids"
        return [self._in_vocabulary(key, token_id) for token_id in self.listed(key, int, [])]

    def _in_vocabulary(self, key: str, token_id: int) -> int:
        num_tokens = len(self.tokens())
        if not 0 <= token_id < num_tokens:
            raise Incompatible(
                "GGUF special token outside the vocabulary",
                file=self.path.name,
                key=key,
                got=token_id,
                tokens=num_tokens,
            )
        return token_id

    def floats(self, name: str) -> list[float] | None:
        """The values of a small float32 tensor, None if the file has none of that name."""
        tensor = self.tensors.get(name)
        if tensor is None:
            return None
        if tensor.type != "F32":
            raise Incompatible(
                "GGUF tensor has another type than expected", tensor=name, want="F32", got=tensor.type
            )
        with self.path.open("rb") as raw:
            raw.seek(tensor.offset)
            content = raw.read(tensor.num_bytes)
        return list(struct.unpack(f"<{math.prod(tensor.shape)}f", content))


def read_gguf(path: Path) -> GgufFile:
    """Read a GGUF file's head; tensor bytes are not touched.

    Raises Incompatible for what isn't a whole, little-endian GGUF file, and for types that the engine can't decode.
    """
    if path.stat().st_size < 24:
        raise Incompatible("not a GGUF file", file=path.name, file_bytes=path.stat().st_size)
    with path.open("rb") as raw, mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ) as view:
        try:
            return _Head(path, view).read()
        except (struct.error, UnicodeDecodeError, OverflowError, _CutShort) as error:
            raise Incompatible("not a whole GGUF file", file=path.name, why=_one_line(error)) from error


class _CutShort(Exception):
    """The head says that something goes on behind the file's end."""


class _Head:
    """Reads a head from front to back; `self._at` is the next byte."""

    def __init__(self, path: Path, view: mmap.mmap) -> None:
        self._path = path
        self._view = view
        self._at = 0

    def read(self) -> GgufFile:
        if self._take(4) != b"GGUF":
            raise Incompatible("not a GGUF file", file=self._path.name, begins=bytes(self._view[:4]))
        version = self._number("I")
        if version & 0xFFFF == 0:
            raise Incompatible(
                "GGUF file has the wrong byte order", file=self._path.name, want="little", got="big"
            )
        if version not in _VERSIONS:
            raise Incompatible(
                "GGUF version is not supported", got=version, supported="2, 3", file=self._path.name
            )
        num_tensors, num_values = self._number("Q"), self._number("Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = self._string()
            metadata[key] = self._value(self._number("I"))
        heads = [self._tensor_head() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0:
            raise Incompatible("GGUF alignment is not a positive number", file=self._path.name, got=alignment)
        start = -(-self._at // alignment) * alignment
        return GgufFile(self._path, metadata, {head[0]: self._tensor(start, *head) for head in heads})

    def _tensor_head(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        num_dimensions = self._number("I")
        if num_dimensions > _MOST_DIMENSIONS:
            raise Incompatible("GGUF tensor has too many dimensions", tensor=name, got=num_dimensions)
        shape = tuple(self._number("Q") for _ in range(num_dimensions))[::-1]
        return name, shape, self._number("I"), self._number("Q")

    def _tensor(self, start: int, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
        type_name = TYPE_NAMES.get(kind, f"type {kind}")
        stored = SUPPORTED.get(type_name)
        if stored is None:
            raise Incompatible(
                "GGUF tensor has an unsupported quantization",
                tensor=name,
                got=type_name,
                supported=", ".join(SUPPORTED),
            )
        num_values = math.prod(shape)
        if not shape or not num_values or shape[-1] % stored.num_values:
            raise Incompatible(
                "GGUF tensor's rows aren't whole blocks", tensor=name, shape=shape, block=stored.num_values
            )
        num_bytes = num_values // stored.num_values * stored.num_bytes
        end = start + offset + num_bytes
        if end > len(self._view):
            raise Incompatible(
                "GGUF file is truncated",
                file=self._path.name,
                tensor=name,
                need_bytes=end,
                file_bytes=len(self._view),
            )
        return GgufTensor(name, type_name, shape, start + offset, num_bytes)

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY and depth < 2:
            return self._array(depth)
        if kind not in _NUMBERS:
            raise Incompatible("GGUF metadata has an unknown type", file=self._path.name, type=kind)
        return self._number(_NUMBERS[kind])

    def _array(self, depth: int) -> list[Any]:
        kind, count = self._number("I"), self._number("Q")
        if kind in _NUMBERS:
            code = _NUMBERS[kind]
            content = self._take(count * struct.calcsize(code))
            return list(struct.unpack(f"<{count}{code}", content))
        if count > len(self._view) - self._at:  # each has a byte at least
            raise _CutShort(f"an array of {count} values")
        return [self._value(kind, depth + 1) for _ in range(count)]

    def _string(self) -> str:
        return self._take(self._number("Q")).decode("utf-8")

    def _number(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._view, self._at)
        self._at += struct.calcsize(f"<{code}")
        return value

    def _take(self, num_bytes: int) -> bytes:
        end = self._at + num_bytes
        if end > len(self._view):
            raise _CutShort(f"{num_bytes} bytes wanted at {self._at}, file ends at {len(self._view)}")
        content = self._view[self._at : end]
        self._at = end
        return content


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
