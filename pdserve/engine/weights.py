"""A model folder's weights, memory-mapped: safetensors (one file or shards) or a GGUF file with its tensor index.

Nothing is read before a tensor is asked for. What has been packed is released again, so that a load needs the memory
of the packed model and little more; workers on one host share the page cache. Quantised matrices that compiled kernels
multiply as they are stored stay there for good.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pdserve.engine import dequant
from pdserve.engine.grouped_matrix import grouped_matrix
from pdserve.engine.mapped_file import MappedFile
from pdserve.engine.model_config import ModelConfig, read_json
from pdserve.engine.stored_matrix import StoredMatrix
from pdserve.malloc import trim_heap
from pdserve.modelstore.errors import BadModel
from pdserve.modelstore.progress import ByteProgress, Silent
from pdserve.modelstore.quantised_tensors import read_model_tensors
from pdserve.modelstore.stored_tensors import StoredTensor

_SAMPLE_BYTES = 64 * 1024
_SAMPLE_PIECES = 16
# Written by whoever saved the file last; they say nothing about the model.
_CONFIG_NOISE = ("_name_or_path", "transformers_version")


class Weights:
    """Tensors of the text model by their Hugging Face names. One thread at a time."""

    def __init__(self, folder: Path, config: ModelConfig, progress: ByteProgress | None = None) -> None:
        """progress is told of the stored bytes that have been read, when the next tensor is asked for.

        Raises BadModel: no weights, broken header, a tensor outside its file, unknown type.
        """
        self._config = config
        self._folder = folder
        self._files: dict[str, MappedFile] = {}
        found = read_model_tensors(folder, read_json(folder / "config.json"))
        self._tensors, self._quantised, self._every = found.stored, found.quantised, found.every
        self._progress = progress or Silent()
        self._progress.begin("weights", self.num_bytes)
        self._asked: set[str] = set()
        self._asked_bytes = 0
        self._unreleased: list[StoredTensor] = []

    def __contains__(self, name: str) -> bool:
        return name in self._tensors or name in self._quantised

    def names(self) -> list[str]:
        return [*self._tensors, *self._quantised]

    @property
    def num_bytes(self) -> int:
        """Of all tensors, as they are stored."""
        return sum(stored.num_bytes for stored in self._every.values())

    @property
    def is_quantised(self) -> bool:
        """Whether any tensor is stored as whole numbers of a few bits."""
        return any(stored.type not in dequant.PLAIN for stored in self._tensors.values()) or any(
            not stored.is_float for stored in self._quantised.values()
        )

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a stored tensor, torch order. Raises BadModel if it is missing."""
        quantised = self._quantised.get(name)
        return self._stored(name).shape if quantised is None else quantised.shape

    def load(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """One tensor in the stored dtype (float32 if it was quantised); plain types are views of the file: don't write.

        Raises BadModel if it is missing or has another shape.
        """
        stored = self._take(name, shape)
        values = dequant.decode(self._bytes(stored), stored.type).view(stored.shape)
        if stored.transform is None:
            return values
        if stored.transform == "minus_one":
            return values.to(torch.float32) - 1.0
        return self._unpermuted(values, stored.transform)

    def matrix(self, name: str, shape: tuple[int, int]) -> StoredMatrix:
        """A matrix that is read when it is packed, or never is, and multiplied as it lies. Raises as `load` does.

        One that the folder has as several tensors is read at once, and laid out anew in this process's own memory.
        """
        quantised = self._quantised.get(name)
        if quantised is not None:
            self._check_shape(name, quantised.shape, shape)
            for part in quantised.tensors:
                self._note(f"{name}@{part.offset}", part)
            return grouped_matrix(name, quantised, self._bytes)
        stored = self._take(name, shape)
        if stored.transform == "minus_one":
            raise BadModel("this tensor can't be transformed", tensor=name, transform=stored.transform)
        matrix = StoredMatrix.of(self._bytes(stored), stored.type, shape)
        transform = stored.transform
        return (
            matrix if transform is None else matrix.reordered(lambda rows: self._unpermuted(rows, transform))
        )

    def release(self) -> None:
        """Give back the memory of the tensors asked for since the last time: they have been packed.

        To be called after each layer. Views of them stay good, and cost reading them again.
        """
        for stored in self._unreleased:
            self._map(stored.file).release(stored.offset, stored.num_bytes)
        self._unreleased.clear()
        trim_heap()  # of what decoding and packing have freed: or the next ones' may find no room in it

    def fingerprint(self, config: Mapping[str, Any]) -> str:
        """BLAKE2b-128 in hex over names, shapes, types, 64 KiB samples of each tensor, and the config.

        config  the content of config.json
        Source: protocol.md, "Values". The sample: all of a tensor up to 64 KiB, else 16 pieces of 4 KiB, evenly apart.
        """
        digest = hashlib.blake2b(digest_size=16)
        clean = {key: value for key, value in config.items() if key not in _CONFIG_NOISE}
        digest.update(json.dumps(clean, sort_keys=True, separators=(",", ":")).encode())
        for name in sorted(self._every):
            stored = self._every[name]
            digest.update(json.dumps([name, list(stored.shape), stored.type, stored.transform]).encode())
            digest.update(_sample(self._bytes(stored)))
            self._map(stored.file).release(stored.offset, stored.num_bytes)
        return digest.hexdigest()

    def _unpermuted(self, rows: Tensor, transform: str) -> Tensor:
        """rows  [rows, …]"""
        heads = self._config.num_heads if transform == "unpermute_q" else self._config.num_kv_heads
        return rows.view(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)

    def _stored(self, name: str) -> StoredTensor:
        if name not in self._tensors:
            raise BadModel("the model lacks a tensor", tensor=name)
        return self._tensors[name]

    def _take(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        """Look a tensor up and note that it is about to be read."""
        stored = self._stored(name)
        self._check_shape(name, stored.shape, shape)
        self._note(name, stored)
        return stored

    @staticmethod
    def _check_shape(name: str, got: tuple[int, ...], want: tuple[int, ...]) -> None:
        if got != want:
            raise BadModel("a tensor's shape is not what the config says", tensor=name, want=want, got=got)

    def _note(self, name: str, stored: StoredTensor) -> None:
        self._progress.reached(self._asked_bytes)
        if name not in self._asked:  # a tied head is asked for twice
            self._asked.add(name)
            self._asked_bytes += stored.num_bytes
        self._unreleased.append(stored)

    def _bytes(self, stored: StoredTensor) -> Tensor:
        return self._map(stored.file).view(stored.offset, stored.num_bytes)

    def _map(self, file: str) -> MappedFile:
        found = self._files.get(file)
        if found is None:
            found = self._files[file] = MappedFile(self._folder / file)
        return found


def _sample(raw: Tensor) -> bytes:
    if raw.numel() <= _SAMPLE_BYTES:
        return raw.numpy().tobytes()
    size = _SAMPLE_BYTES // _SAMPLE_PIECES
    last = raw.numel() - size
    starts = (last * piece // (_SAMPLE_PIECES - 1) for piece in range(_SAMPLE_PIECES))
    return b"".join(raw[start : start + size].numpy().tobytes() for start in starts)
