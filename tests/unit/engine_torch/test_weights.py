"""Weights of a folder: shards, a GGUF with its index, the fingerprint, and one line for each way to be broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pdserve.engine.config_reader import load_config
from pdserve.engine.model_config import read_json
from pdserve.engine.models import MODELS
from pdserve.engine.weights import Weights
from pdserve.modelstore.errors import BadModel
from tests.support.hf_quantised import FORMATS, quantise
from tests.unit.engine_torch.random_gguf import write_gguf
from tests.unit.engine_torch.random_model import SMALL, llama_tensors, write_random_model

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
K_PROJ = "model.layers.1.self_attn.k_proj.weight"


def open_weights(folder: Path) -> Weights:
    return Weights(folder, load_config(folder, MODELS))


def fingerprint(folder: Path) -> str:
    return open_weights(folder).fingerprint(read_json(folder / "config.json"))


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_safetensors(tmp_path: Path, shards: int, dtype: torch.dtype) -> None:
    folder = write_random_model(tmp_path, seed=3, dtype=dtype, shards=shards)
    weights = open_weights(folder)
    for name, want in llama_tensors(SMALL, 3, dtype).items():
        got = weights.load(name, tuple(want.shape))
        assert got.dtype is dtype
        assert torch.equal(got, want)
    assert "lm_head.weight" not in weights


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_gguf(tmp_path: Path, kind: str) -> None:
    wanted = write_gguf(tmp_path, kind)
    weights = open_weights(tmp_path)
    for name, want in wanted.items():
        assert torch.equal(weights.load(name, tuple(want.shape)).to(torch.float32), want), name


def test_fingerprint_says_which_weights_these_are(tmp_path: Path) -> None:
    first = write_random_model(tmp_path / "a", seed=1)
    same = write_random_model(tmp_path / "b", seed=1, transformers_version="9.9", _name_or_path="elsewhere")
    others = [
        write_random_model(tmp_path / "c", seed=2),
        write_random_model(tmp_path / "d", seed=1, dtype=torch.bfloat16),
        write_random_model(tmp_path / "e", seed=1, rope_theta=20000.0),
    ]
    want = fingerprint(first)
    assert len(bytes.fromhex(want)) == 16
    assert fingerprint(same) == want
    assert len({want, *map(fingerprint, others)}) == 4


def test_fingerprint_says_how_weights_are_stored(tmp_path: Path) -> None:
    """Workers of one model in two formats don't pair; nor does one with the dequantised numbers."""
    found: set[str] = set()
    for name in ("ct w4a16 g32", "gptq int4 g32 asym", "gptq_v2 int4 g32 asym", "awq int4 g32"):
        folder = write_random_model(tmp_path / name, seed=1)
        wanted = quantise(folder, FORMATS[name])
        plain = write_random_model(tmp_path / f"{name} plain", seed=1)
        save_file(wanted, plain / "model.safetensors")
        assert fingerprint(folder) not in {*found, fingerprint(plain)}
        found.add(fingerprint(folder))


def test_fingerprint_of_the_test_model_never_changes(tmp_path: Path) -> None:
    config = {"vocab_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    save_file({"b": torch.arange(20_000.0), "a": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    assert open_weights(tmp_path).fingerprint(config) == "7acff31116348698d2bc75e995ee0d7d"


def edit_index(folder: Path, name: str, **changes: Any) -> None:
    index = json.loads((folder / "tensors.json").read_text())
    index["tensors"][name] |= changes
    (folder / "tensors.json").write_text(json.dumps(index))


@pytest.mark.parametrize("kind", ["F32", "BF16"])
def test_norms_that_were_stored_plus_one(tmp_path: Path, kind: str) -> None:
    wanted = write_gguf(tmp_path, kind)
    name = next(iter(wanted))
    edit_index(tmp_path, name, transform="minus_one")
    got = open_weights(tmp_path).load(name, tuple(wanted[name].shape))
    assert got.dtype is torch.float32
    assert torch.equal(got, wanted[name] - 1.0)


def test_a_missing_tensor(tmp_path: Path) -> None:
    weights = open_weights(write_random_model(tmp_path))
    with pytest.raises(BadModel, match=r"lacks a tensor \(tensor=lm_head\.weight\)"):
        weights.load("lm_head.weight", (320, 96))


def test_a_wrong_shape(tmp_path: Path) -> None:
    weights = open_weights(write_random_model(tmp_path))
    with pytest.raises(BadModel, match=r"norm\.weight, want=\(97,\), got=\(96,\)"):
        weights.load("model.norm.weight", (97,))


@pytest.mark.parametrize("keep", [0.0, 0.001, 0.05, 0.9])
def test_a_truncated_shard_names_the_file(tmp_path: Path, keep: float) -> None:
    folder = write_random_model(tmp_path, shards=2)
    shard = folder / "model-00002-of-00002.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(BadModel, match="00002-of-00002"):
        open_weights(folder)


def test_a_missing_shard_names_the_file(tmp_path: Path) -> None:
    folder = write_random_model(tmp_path, shards=2)
    (folder / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(BadModel, match=r"lacks a file.*00001-of-00002"):
        open_weights(folder)


def test_a_type_that_is_not_supported(tmp_path: Path) -> None:
    folder = write_random_model(tmp_path, dtype=torch.float64)
    with pytest.raises(BadModel, match=r"got=F64, supported=F32"):
        open_weights(folder)


def test_no_weights(tmp_path: Path) -> None:
    folder = write_random_model(tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(BadModel, match=r"neither \*\.safetensors nor tensors\.json"):
        open_weights(folder)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"type": "IQ2_XXS"}, "got=IQ2_XXS"),
        ({"nbytes": 12}, "got=12"),
        ({"offset": 10**9}, "weights file is truncated"),
        ({"offset": -8}, "weights file is truncated"),
        ({"shape": [9216, 1]}, "isn't whole blocks"),
        ({"transform": "mirror"}, "transform=mirror"),
        ({"shape": None}, "tensors.json is broken"),
    ],
)
def test_a_broken_index_names_the_tensor(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    write_gguf(tmp_path, "Q4_1")
    edit_index(tmp_path, Q_PROJ, **changes)
    with pytest.raises(BadModel) as caught:
        open_weights(tmp_path)
    assert words in str(caught.value)
    assert Q_PROJ in str(caught.value) or "tensors.json" in words


def test_a_truncated_gguf_names_tensor_and_file(tmp_path: Path) -> None:
    write_gguf(tmp_path, "Q8_0")
    file = tmp_path / "weights.gguf"
    file.write_bytes(file.read_bytes()[:-5000])
    with pytest.raises(BadModel, match=r"truncated \(file=weights\.gguf, tensor=.*need_bytes="):
        open_weights(tmp_path)


def test_an_index_without_its_file(tmp_path: Path) -> None:
    write_gguf(tmp_path, "F16")
    (tmp_path / "weights.gguf").unlink()
    with pytest.raises(BadModel, match=r"lacks a file.*weights\.gguf"):
        open_weights(tmp_path)
