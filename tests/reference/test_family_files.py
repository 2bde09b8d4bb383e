"""A model from a GGUF file = from a Hugging Face folder with the same numbers, for every family and format."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from pdserve.modelstore import resolve
from tests.support.gguf_models import write_model
from tests.support.random_families import save_random
from tests.support.vocabularies import Vocabulary, byte_level, gemma, llama
from tests.unit.engine_torch.driving import Stream, advance_with_logits, make_runner

VOCABULARIES: dict[str, Vocabulary] = {
    "llama": llama(),
    "llama yarn": byte_level("llama-bpe"),
    "mistral": llama(),
    "mixtral": llama(),
    "qwen2": byte_level("qwen2"),
    "qwen3": byte_level("qwen2"),
    "qwen3 moe": byte_level("qwen2"),
    "gemma3 capped": gemma(),
    "phi3 window": llama(),
    "phi4 mini": byte_level("gpt-4o"),
}
KINDS = ("F32", "F16", "BF16", "Q8_0", "Q5_0", "Q5_1", "Q4_0", "Q4_1")
DIAGONAL = [
    ("mixtral", "F32"),
    ("mixtral", "Q4_1"),
    ("qwen3 moe", "F16"),
    ("qwen3 moe", "Q8_0"),
    ("llama", "Q4_0"),
    ("llama yarn", "BF16"),
    ("mistral", "Q5_0"),
    ("qwen2", "Q5_1"),
    ("qwen3", "F32"),
    ("gemma3 capped", "Q8_0"),
    ("phi3 window", "Q4_1"),
    ("phi4 mini", "F16"),
]
# What GGUF files don't say, and llama.cpp takes for granted.
GRANTED: dict[str, dict[str, Any]] = {"gemma3 capped": {"query_pre_attn_scalar": 16}}
Tensors = dict[str, np.ndarray[Any, Any]]


def rounded(tensors: Tensors, kind: gguf.GGMLQuantizationType) -> Tensors:
    """What remains of each matrix in that format; a router's and vectors are stored whole."""

    def of(name: str, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        if values.ndim == 1 or name.endswith(("mlp.gate.weight", "moe.gate.weight")):
            return values
        return np.asarray(gguf.dequantize(gguf.quantize(values, kind), kind), dtype=np.float32)

    return {name: of(name, values) for name, values in tensors.items()}


def logits_of(folder: Path, ids: list[int]) -> torch.Tensor:
    """Behind a prompt in chunks, and of some tokens more."""
    stream, runner = Stream(list(ids), list(range(8))), make_runner(folder)
    given = [advance_with_logits(runner, [(stream, 32)])[0] for _ in range(8)]
    return torch.stack([logits for logits in given if logits is not None])


def check(name: str, kind: str, tmp_path: Path) -> None:
    vocabulary, stored = VOCABULARIES[name], gguf.GGMLQuantizationType[kind]
    folder = save_random(name, tmp_path / "saved", vocab_size=len(vocabulary.tokens), **GRANTED.get(name, {}))
    config = json.loads((folder / "config.json").read_text())
    tensors: Tensors = load_file(folder / "model.safetensors")
    if name in ("mixtral", "qwen3 moe"):  # one by one, as published files have them
        assert any(".experts.3." in tensor for tensor in tensors)
    file = write_model(tmp_path / "m.gguf", config, tensors, vocabulary, stored)
    save_file(rounded(tensors, stored), folder / "model.safetensors")
    draw = random.Random(3)
    ids = [draw.randrange(3, len(vocabulary.tokens)) for _ in range(70)]
    imported = logits_of(resolve(file, tmp_path / "cache"), ids)
    assert len(imported) == 6
    assert torch.equal(imported, logits_of(folder, ids))


@pytest.mark.parametrize(("name", "kind"), DIAGONAL)
def test_some(name: str, kind: str, tmp_path: Path) -> None:
    check(name, kind, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", VOCABULARIES)
def test_all(name: str, kind: str, tmp_path: Path) -> None:
    check(name, kind, tmp_path)
