"""Quantised folders of families with fused projections, experts, prefixes: answers are those of dequantised ones."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdserve.modelstore.model_facts import read_facts
from tests.reference.test_families import reference_logits
from tests.support.hf_quantised import FORMATS, quantise
from tests.support.random_families import save_random, save_with_images
from tests.unit.engine_torch.driving import Stream, advance_with_logits, make_runner

IDS = [7 * index % 300 + 3 for index in range(40)]
CASES = [
    ("qwen2", "awq int4 g32"),  # biases, a head of its own
    ("phi3", "gptq int4 g32 asym"),  # fused projections
    ("qwen3 moe, some layers dense", "fp8 blocks"),
    ("mixtral", "ct w4a16 g32"),
    ("gemma3 pattern", "ct w8a8"),
    ("llama", "gptq int4 g32 act order"),
]


def logits(folder: Path) -> torch.Tensor:
    (given,) = advance_with_logits(make_runner(folder), [(Stream(list(IDS), list(range(4))), len(IDS))])
    assert given is not None
    return given


@pytest.mark.parametrize(("family", "form"), CASES)
def test_a_family(family: str, form: str, tmp_path: Path) -> None:
    folder = save_random(family, tmp_path / "quantised")
    plain = shutil.copytree(folder, tmp_path / "plain")
    wanted = quantise(folder, FORMATS[form])
    save_file(wanted, plain / "model.safetensors")
    assert torch.equal(logits(folder), logits(plain))
    facts, others = read_facts(folder), read_facts(plain)
    assert facts.num_parameters == others.num_parameters
    assert facts.weights_bytes < 0.5 * others.weights_bytes
    assert any(form.split()[0].removeprefix("ct") in kind for kind in facts.tensor_types)


def test_a_text_model_that_is_a_part_of_another(tmp_path: Path) -> None:
    """What sees images stays as it is, under names that the text model doesn't have."""
    folder = save_with_images(tmp_path / "quantised")
    plain = shutil.copytree(folder, tmp_path / "plain")
    wanted = quantise(folder, FORMATS["ct w4a16 g32"], keep=lambda module: "language_model" not in module)
    save_file(wanted, plain / "model.safetensors")
    assert torch.equal(logits(folder), logits(plain))


@pytest.mark.parametrize("form", ["ct w4a16 g32", "ct w8a16 g32", "ct w4a16 channel"])
def test_transformers_loads_the_same(form: str, tmp_path: Path) -> None:
    """With the package compressed-tensors: config.json, names and numbers as a public loader takes them.

    Packed zero points, transformers 5.24 takes for others; test_compressed_tensors.py has those.
    """
    pytest.importorskip("compressed_tensors", reason="compressed-tensors isn't installed")
    folder = save_random("qwen2", tmp_path)
    quantise(folder, FORMATS[form], keep=lambda module: module == "lm_head")
    assert "lm_head.weight" in load_file(folder / "model.safetensors")
    want = reference_logits(folder, IDS)[-1]
    assert (logits(folder) - want).abs().max() <= 1e-3 + 4e-3 * want.abs().max()
