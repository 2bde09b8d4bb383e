"""What the tests write as compressed-tensors do, as that package itself unpacks it; and it writes, we read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pdserve.engine.config_reader import load_config
from pdserve.engine.models import MODELS
from pdserve.engine.weights import Weights
from tests.support.hf_quantised import FORMATS, Format, quantisation_config, quantise
from tests.unit.engine_torch.random_model import write_random_model

pytest.importorskip("compressed_tensors", reason="compressed-tensors isn't installed")
NAMES = [name for name, form in FORMATS.items() if form.method == "compressed-tensors"]
MODULE = "model.layers.0.mlp.down_proj"


def package(form: Format) -> tuple[Any, Any]:
    """Its compressor for a format, and its scheme."""
    import compressed_tensors.compressors as compressors
    from compressed_tensors.quantization import QuantizationScheme

    found = compressors.BaseCompressor.get_value_from_registry(form.style)
    return found, QuantizationScheme(**quantisation_config(form)["config_groups"]["group_0"])


def parts_of(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name.removeprefix(f"{MODULE}."): tensor for name, tensor in tensors.items() if name.startswith(MODULE)
    }


def read(folder: Path) -> Tensor:
    weights = Weights(folder, load_config(folder, MODELS))
    rows, columns = weights.shape(f"{MODULE}.weight")
    return weights.matrix(f"{MODULE}.weight", (rows, columns)).values()


@pytest.mark.parametrize("name", NAMES)
def test_the_package_unpacks_what_we_read(name: str, tmp_path: Path) -> None:
    form = FORMATS[name]
    folder = write_random_model(tmp_path, seed=5)
    quantise(folder, form)
    compressor, scheme = package(form)
    theirs: Tensor = compressor.decompress(parts_of(load_file(folder / "model.safetensors")), scheme)[
        "weight"
    ]
    # They multiply in the scale's dtype: the same rounding, later.
    assert torch.equal(read(folder).to(theirs.dtype), theirs)


@pytest.mark.parametrize("name", NAMES)
def test_we_read_what_the_package_writes(name: str, tmp_path: Path) -> None:
    form = FORMATS[name]
    folder = write_random_model(tmp_path, seed=5)
    weight = load_file(folder / "model.safetensors")[f"{MODULE}.weight"]
    quantise(folder, form)
    tensors = load_file(folder / "model.safetensors")
    compressor, scheme = package(form)
    # The scales and zero points of ours, in the form that they have before packing.
    ours = parts_of(tensors)
    zeros = compressor.decompress(dict(ours), scheme).get("weight_zero_point", torch.zeros(1))
    before = {
        "weight": weight,
        "weight_scale": ours["weight_scale"],
        "weight_zero_point": zeros.to(torch.int8),
    }
    theirs = compressor.compress(before, scheme)
    assert set(theirs) == set(ours)
    others = {key: tensor for key, tensor in tensors.items() if not key.startswith(MODULE)}
    save_file(
        {**others, **{f"{MODULE}.{key}": tensor for key, tensor in theirs.items()}},
        folder / "model.safetensors",
    )
    step = ours["weight_scale"].float().abs().max() * (32 if "fp8" in name else 1)
    assert (read(folder) - weight).abs().max() <= step
