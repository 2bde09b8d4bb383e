"""Loading makes no second copy of the weights: what a process holds while and after it loads, by the kernel's count.

Bounds are generous: they tell one copy from two, not a megabyte from another.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.load_memory import LoadMemory, measure_apart
from pdserve.engine.native import library
from pdserve.engine.numerics import choose_precision
from tests.support.hf_quantised import FORMATS, quantise
from tests.support.processes import run_cli
from tests.unit.engine_torch.random_model import write_random_model

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")

# Widths are multiples of 512, to which FBGEMM pads; 40 million parameters.
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 8000,
}
STORED = {"F32": torch.float32, "BF16": torch.bfloat16}
MB = 1_000_000


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = tmp_path_factory.mktemp("models")
    folders = {}
    for kind, dtype in STORED.items():
        folders[kind] = write_random_model(made / kind, dtype=dtype, **SIZES)
        (folders[kind] / "tokenizer.json").write_text("{}")  # nobody reads it here
    return folders


def check(found: LoadMemory, num_parameters: int, largest: int) -> None:
    """largest: parameters of the largest matrix."""
    print(found)
    value_bytes = choose_precision(found.dtype).compute.itemsize if found.dtype == "float32" else 2
    packed_bytes = num_parameters * value_bytes
    assert 0.9 * packed_bytes < found.private_bytes < 1.1 * packed_bytes + 16 * MB
    assert found.mapped_bytes < 64 * MB  # libraries; of the weights only what nobody has looked at yet
    while_packing = 3 * 4 * largest  # decoded, converted and packed
    assert found.peak_bytes < packed_bytes + found.stored_bytes / 2 + while_packing


@pytest.mark.parametrize(("kind", "dtype"), [("F32", "float32"), ("F32", "bfloat16"), ("BF16", "bfloat16")])
def test_plain_weights(kind: str, dtype: str, folders: dict[str, Path]) -> None:
    num_parameters = (folders["BF16"] / "model.safetensors").stat().st_size // 2
    check(measure_apart(folders[kind], dtype), num_parameters, SIZES["vocab_size"] * SIZES["hidden_size"])


def test_quantised_weights() -> None:
    assert run_cli("fetch", "smollm2-135m", limit_s=250).returncode == 0
    check(measure_apart("smollm2-135m", "float32"), 134_515_008, 49_152 * 576)


@pytest.mark.skipif(not library.available(), reason="no compiled kernels here")
def test_compiled_kernels_copy_no_quantised_weights() -> None:
    assert run_cli("fetch", "smollm2-135m", limit_s=250).returncode == 0
    found = measure_apart("smollm2-135m", "bfloat16")
    print(found)
    assert found.private_bytes < 16 * MB
    assert found.peak_bytes < found.stored_bytes + 60 * MB


@pytest.mark.skipif(not library.available(), reason="no compiled kernels here")
def test_quantised_folders_are_as_large_as_they_are_stored(tmp_path: Path) -> None:
    """Blocks of 32 with a scale of 16 bits, whatever the groups; the head is tied, and packed as bfloat16."""
    folder = write_random_model(tmp_path, dtype=torch.bfloat16, **SIZES)
    quantise(folder, replace(FORMATS["ct w4a16 g32"], group=128))
    (folder / "tokenizer.json").write_text("{}")
    found = measure_apart(folder, "bfloat16")
    print(found)
    table = 2 * SIZES["vocab_size"] * SIZES["hidden_size"]
    packed = (found.stored_bytes - table) * 1.1 + table
    assert found.private_bytes < packed + 16 * MB
    largest = 8 * SIZES["hidden_size"] * 2 * SIZES["intermediate_size"]
    assert found.peak_bytes < packed + found.stored_bytes / 2 + largest + 16 * MB
