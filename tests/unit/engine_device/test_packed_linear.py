"""Quantised weights on a device: they stay as they are stored, and multiply as if they had been decoded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pdserve.engine.device.packed_linear import PackedDeviceLinear, Trial, on_device, untried, verify_products
from pdserve.engine.layers import make_linear
from pdserve.engine.numerics import Precision
from pdserve.engine.stored_matrix import StoredMatrix
from pdserve.errors import Incompatible
from tests.support.hf_quantised import FORMATS, quantise
from tests.support.quantised import GROUPED_KINDS, KINDS, drawn_blocks
from tests.unit.engine_device.driving import BFLOAT16, FLOAT32, make_device_runner
from tests.unit.engine_device.test_device_runner import VOCABULARY, mixed
from tests.unit.engine_torch.driving import make_runner
from tests.unit.engine_torch.random_gguf import write_gguf
from tests.unit.engine_torch.random_model import write_random_model

CPU = torch.device("cpu")


def generator(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("kind", [*KINDS, *GROUPED_KINDS])
@pytest.mark.parametrize("precision", [FLOAT32, BFLOAT16], ids=lambda each: each.name)
def test_a_product_is_that_of_the_decoded_weight(kind: str, precision: Precision) -> None:
    weight = drawn_blocks(40, 256, kind, generator())
    bias = torch.randn(40, generator=generator(2))
    x = torch.randn(5, 256, generator=generator(3)).to(precision.compute)
    linear = make_linear(precision, weight, bias)
    assert isinstance(linear, PackedDeviceLinear)
    want = functional.linear(x, weight.values().to(precision.compute), bias.to(precision.compute))
    assert torch.equal(linear(x), want)


def test_what_lies_on_the_device_is_what_was_stored() -> None:
    """Rows in their order, neighbours of one kind together: fewer, larger kernels."""
    q, k, v = (
        drawn_blocks(rows, 256, kind, generator(rows))
        for rows, kind in ((24, "Q4_K"), (8, "Q4_K"), (8, "Q6_K"))
    )
    turned = q.reordered(lambda rows: rows.flip(0))
    there = on_device(StoredMatrix([*turned.parts, *k.parts, *v.parts], 256), CPU)
    assert [(part.kind, len(part)) for part in there.parts] == [("Q4_K", 32), ("Q6_K", 8)]
    assert sum(part.raw.numel() for part in there.parts) == 32 * 144 + 8 * 210
    assert torch.equal(there.values(), torch.cat((q.values().flip(0), k.values(), v.values())))


class Wrong(PackedDeviceLinear):
    """One number is off, in steps of many rows."""

    def __call__(self, x: Tensor) -> Tensor:
        y = super().__call__(x)
        y[70:, 3] += 0.5
        return y


def test_a_kernel_that_computes_wrongly_is_not_served_with() -> None:
    weight = StoredMatrix(
        [*drawn_blocks(8, 256, "Q8_0", generator()).parts, *drawn_blocks(8, 256, "Q4_K", generator()).parts],
        256,
    )
    verify_products(PackedDeviceLinear, weight, torch.float32)
    with pytest.raises(
        Incompatible, match=r"computes wrongly \(kernels=product, kind=Q8_0, rows=80, error=0\.5"
    ):
        verify_products(Wrong, weight, torch.float32)


@pytest.mark.parametrize(("first", "last"), [(16, 32), (32, 64)])
def test_each_size_of_tile_is_tried(first: int, last: int) -> None:
    """A kernel that is wrong in one of them only: those for 17 to 32 and for 33 to 64 rows."""

    class OneTile(PackedDeviceLinear):
        def __call__(self, x: Tensor) -> Tensor:
            return super().__call__(x) + (first < len(x) <= last)

    weight = drawn_blocks(8, 256, "I4_128", generator())
    with pytest.raises(Incompatible, match=rf"kind=I4_128, rows={17 if last == 32 else 64}, error=1"):
        verify_products(OneTile, weight, torch.float32)


def test_a_kernel_is_tried_once_for_a_kind_and_a_width() -> None:
    tried: set[Trial] = set()

    def kinds(weight: StoredMatrix, compute: torch.dtype = torch.bfloat16) -> list[str]:
        return [part.kind for part in untried(weight, compute, tried).parts]

    both = [
        *drawn_blocks(8, 256, "I8_128", generator()).parts,
        *drawn_blocks(8, 256, "I4_64", generator()).parts,
    ]
    assert kinds(StoredMatrix(both[:1], 256)) == ["I8_128"]
    assert kinds(StoredMatrix(both, 256)) == ["I4_64"]
    assert kinds(StoredMatrix(both, 256)) == []
    assert kinds(StoredMatrix(both[:1], 256), torch.float32) == ["I8_128"]
    assert kinds(drawn_blocks(8, 512, "I8_128", generator())) == ["I8_128"]


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q5_0"])
def test_a_quantised_model_gives_the_tokens_of_the_cpu(kind: str, tmp_path: Path) -> None:
    write_gguf(tmp_path, kind)
    ids, logits = mixed(make_device_runner(tmp_path), VOCABULARY)
    want_ids, want = mixed(make_runner(tmp_path, num_blocks=64), VOCABULARY)
    assert ids == want_ids
    for got, each in zip(logits, want, strict=True):
        assert float((got - each).abs().max()) < 1e-4


@pytest.mark.parametrize("name", ["ct w4a16 g32", "gptq int8 g32 asym", "fp8 blocks"])
def test_a_quantised_folder_gives_the_tokens_of_the_cpu(name: str, tmp_path: Path) -> None:
    quantise(write_random_model(tmp_path, seed=3, hidden_size=128, num_attention_heads=8), FORMATS[name])
    ids, logits = mixed(make_device_runner(tmp_path), VOCABULARY)
    want_ids, want = mixed(make_runner(tmp_path, num_blocks=64), VOCABULARY)
    assert ids == want_ids
    for got, each in zip(logits, want, strict=True):
        assert float((got - each).abs().max()) < 1e-4
