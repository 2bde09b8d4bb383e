"""Quantised Hugging Face folders: what is read is what was stored, and answers are those of the dequantised model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pdserve.engine.config_reader import load_config
from pdserve.engine.models import MODELS
from pdserve.engine.native import library
from pdserve.engine.native.blocks import as_multiplied
from pdserve.engine.numerics import choose_precision
from pdserve.engine.weights import Weights
from tests.support.hf_quantised import FORMATS, quantise
from tests.unit.engine_torch.driving import Stream, advance_with_logits, make_runner
from tests.unit.engine_torch.random_model import write_random_model

SIZES: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 8, "intermediate_size": 192}
# What compiled kernels multiply as it is; the rest is decoded at load.
BY_BYTES = {
    name
    for name in FORMATS
    if "fp8" not in name and "act order" not in name and not ("8" in name.split()[1] and "asym" in name)
}
QUICK = {"ct w4a16 g32", "gptq int4 g32 asym", "awq int4 g32", "fp8 blocks"}
each_format = pytest.mark.parametrize("name", FORMATS)


@each_format
def test_values_are_what_was_stored(name: str, tmp_path: Path) -> None:
    """s · (q − z) with the scale as stored, to the bit."""
    folder = write_random_model(tmp_path, seed=3, **SIZES)
    wanted = quantise(folder, FORMATS[name])
    weights = Weights(folder, load_config(folder, MODELS))
    assert set(weights.names()) == set(wanted)
    for tensor, values in wanted.items():
        assert weights.shape(tensor) == values.shape
        if values.ndim == 2:
            got = weights.matrix(tensor, (values.shape[0], values.shape[1])).values()
            assert torch.equal(got, values), tensor


@each_format
def test_what_kernels_multiply(name: str, tmp_path: Path) -> None:
    """The same codes with scales of 16 bits: exact where those hold them, else within a 2,048th, and a low end's 128th
    of a step."""
    folder = write_random_model(tmp_path, seed=3, **SIZES)
    form = FORMATS[name]
    wanted = quantise(folder, form)
    weights = Weights(folder, load_config(folder, MODELS))
    tensor = "model.layers.0.mlp.down_proj.weight"
    values = wanted[tensor]
    blocks = as_multiplied(weights.matrix(tensor, (values.shape[0], values.shape[1])))
    if name not in BY_BYTES:
        assert blocks is None or not blocks.is_quantised
        return
    assert blocks is not None and {part.kind for part in blocks.parts} <= {"Q8_0", "Q4_0", "Q4_1"}
    if form.symmetric and form.scale is not torch.float32:
        assert torch.equal(blocks.values(), values)
    step = values.abs().max() / 7
    assert (blocks.values() - values).abs().le(values.abs() / 2048 + step / 64).all()


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FORMATS]
)
def test_logits_are_those_of_the_dequantised_model(name: str, tmp_path: Path) -> None:
    folder = write_random_model(tmp_path, seed=3, **SIZES)
    plain = write_random_model(tmp_path / "plain", seed=3, **SIZES)
    save_file(quantise(folder, FORMATS[name]), plain / "model.safetensors")
    ids = list(range(5, 45))

    def logits(of: Path, dtype: str, kernels: str) -> torch.Tensor:
        runner = make_runner(of, precision=choose_precision(dtype, kernels=kernels))
        (given,) = advance_with_logits(runner, [(Stream(list(ids), list(range(4))), len(ids))])
        assert given is not None
        return given

    want = logits(plain, "float32", "torch")
    assert torch.equal(logits(folder, "float32", "torch"), want)
    assert torch.equal(logits(folder, "bfloat16", "torch"), logits(plain, "bfloat16", "torch"))
    if library.why_none():
        pytest.skip(f"all but compiled kernels, which {library.why_none()}")
    got = logits(folder, "bfloat16", "native")
    assert (got - want).abs().max() <= 0.05 * want.abs().max()
