"""Triton's products with packed weights against torch's, on drawn shapes, in its interpreter: `make test-kernels`."""

from __future__ import annotations

import os
import random

import pytest
import torch

from pdserve.engine.device.packed_linear import PackedDeviceLinear, on_device
from pdserve.engine.stored_matrix import StoredMatrix
from pdserve.modelstore.grouped_types import UNITS
from tests.support.quantised import GROUPED_KINDS, KINDS, drawn_blocks

triton = pytest.importorskip("triton", reason="Triton isn't installed: make test-kernels")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs in Triton's interpreter: make test-kernels", allow_module_level=True)

from pdserve.engine.device.triton_linear import TritonLinear  # noqa: E402  needs Triton

pytestmark = pytest.mark.slow
ALL = [*KINDS, *GROUPED_KINDS]
WITHIN = 2e-6  # of the largest result


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("seed", range(6))
def test_products(kind: str, seed: int) -> None:
    """Any number of rows and outputs; rows that are parts of wider ones; another kind beside it, and a bias."""
    source = random.Random(seed * 100 + ALL.index(kind))
    generator = torch.Generator().manual_seed(source.getrandbits(32))
    unit = UNITS[kind].num_values
    width = unit * source.choice([1, 2] if unit == 256 else [1, 2, 3] if unit > 32 else [1, 2, 3, 5, 9])
    parts = [*drawn_blocks(source.choice([1, 5, 64, 70, 130]), width, kind, generator).parts]
    if source.random() < 0.4:
        parts += drawn_blocks(source.choice([3, 65]), width, "Q8_0", generator).parts
    weight = on_device(StoredMatrix(parts, width), torch.device("cpu"))
    outputs = weight.shape[0]
    bias = torch.randn(outputs, generator=generator) if source.random() < 0.5 else None
    rows = source.choice([1, 2, 15, 16, 17, 40, 64, 65, 90])
    x = torch.randn(rows, width + source.choice([0, 8]), generator=generator)[:, :width]
    want = PackedDeviceLinear(weight, bias)(x)
    got = TritonLinear(weight, bias)(x)
    assert got.shape == want.shape and got.dtype is want.dtype
    assert float((got - want).abs().max()) <= WITHIN * float(want.abs().max())


@pytest.mark.parametrize("kind", ALL)
def test_values_are_the_decoders(kind: str) -> None:
    """Bit for bit but for products that are rounded once where the decoder rounds twice."""
    weight = drawn_blocks(33, 512, kind, torch.Generator().manual_seed(7))
    got = TritonLinear(weight, None)._decoded(torch.float32)
    torch.testing.assert_close(got, weight.values(), rtol=3e-7, atol=1e-9)


def test_sixteen_bits_and_no_rows() -> None:
    """float16, since the interpreter multiplies bfloat16 as the integers that it keeps them in."""
    weight = drawn_blocks(48, 96, "Q4_0", torch.Generator().manual_seed(1))
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(2)).to(torch.float16)
    linear = TritonLinear(weight, None)
    assert float((linear(x) - PackedDeviceLinear(weight, None)(x)).abs().max()) < 2e-2
    assert linear(x[:0]).shape == (0, 48)


def test_every_float_of_eight_bits() -> None:
    """Subnormal ones and both zeros too; 127 and 255 are no numbers."""
    codes = torch.arange(256, dtype=torch.uint8).view(2, 128)
    scale = torch.ones(2, 1).view(torch.uint8)
    weight = StoredMatrix.of(torch.cat((scale, codes), dim=1).view(-1), "F8_128", (2, 128))
    got = TritonLinear(weight, None)._decoded(torch.float32)
    assert torch.equal(got.isnan(), codes & 127 == 127)
    assert torch.equal(got.nan_to_num(), codes.view(torch.float8_e4m3fn).float().nan_to_num())
