"""Block formats equal the `gguf` package's decoding, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.engine import dequant
from pdserve.modelstore.gguf_types import SUPPORTED
from tests.support.quantised import SCALES

KINDS = list(SUPPORTED)
WRITABLE = [kind for kind in KINDS if not kind.endswith("_K")]  # what the package can write, too


def finite(raw: np.ndarray[Any, Any], kind: str) -> np.ndarray[Any, Any]:
    """Take the highest bit of each scale's exponent away: no inf, no NaN; subnormal and huge ones stay."""
    for place in SCALES[kind]:
        raw[:, place + 1] &= 0xBF
    return raw


def assert_equal_bits(raw: np.ndarray[Any, Any], kind: str) -> None:
    want = dequantize(raw, GGMLQuantizationType[kind]).reshape(-1)
    got = dequant.decode(torch.from_numpy(raw.reshape(-1)), kind)
    assert got.dtype is torch.float32
    assert got.numpy().tobytes() == want.tobytes()


@pytest.mark.parametrize("kind", SCALES)
def test_many_random_blocks(kind: str) -> None:
    size = SUPPORTED[kind].num_bytes
    raw = np.random.default_rng(11).integers(0, 256, (4096, size), dtype=np.uint8)
    assert_equal_bits(finite(raw, kind), kind)


@pytest.mark.parametrize("kind", SCALES)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_valid_blocks(kind: str, data: st.DataObject) -> None:
    """Bytes as Hypothesis likes them: all zeros, all ones, runs, single bits."""
    size = SUPPORTED[kind].num_bytes
    num_blocks = data.draw(st.integers(1, 3))
    content = data.draw(st.binary(min_size=num_blocks * size, max_size=num_blocks * size))
    raw = np.frombuffer(bytearray(content), dtype=np.uint8).reshape(num_blocks, size)
    assert_equal_bits(finite(raw, kind), kind)


def test_sizes_are_ggmls() -> None:
    for kind, unit in SUPPORTED.items():
        assert (unit.num_values, unit.num_bytes) == GGML_QUANT_SIZES[GGMLQuantizationType[kind]]


@pytest.mark.parametrize("kind", WRITABLE)
def test_quantised_weights(kind: str) -> None:
    values = np.random.default_rng(12).standard_normal((8, 96), dtype=np.float32)
    raw = quantize(values, GGMLQuantizationType[kind])
    want = dequantize(raw, GGMLQuantizationType[kind])
    got = dequant.decode(torch.from_numpy(raw.view(np.uint8).reshape(-1)), kind).to(torch.float32)
    assert got.view(8, 96).numpy().tobytes() == want.astype(np.float32).tobytes()
    unit = SUPPORTED[kind]
    assert values.size // unit.num_values * unit.num_bytes == raw.nbytes


@pytest.mark.parametrize(
    ("kind", "dtype"), [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)]
)
def test_plain_types_are_views_and_survive_odd_offsets(kind: str, dtype: torch.dtype) -> None:
    values = torch.arange(10).to(dtype)
    raw = values.view(torch.uint8)
    assert dequant.decode(raw, kind).data_ptr() == raw.data_ptr()
    shifted = torch.cat((torch.zeros(1, dtype=torch.uint8), raw))[1:]
    assert torch.equal(dequant.decode(shifted, kind), values)
