"""Block formats equal the `gguf` package's decoding, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, dequantize, quantize

from pdserve.engine import dequant

KINDS = list(dequant.UNITS)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_random_blocks(kind: str) -> None:
    """Any bytes with finite scales are valid blocks: all nibbles, signs, subnormal and huge scales."""
    rng = np.random.default_rng(11)
    _, size = dequant.UNITS[kind]
    raw = rng.integers(0, 256, (4096, size), dtype=np.uint8)
    raw[:, 1] &= 0xBF  # exponents below the highest: no inf, no NaN
    if kind == "Q4_1":
        raw[:, 3] &= 0xBF
    want = dequantize(raw, GGMLQuantizationType[kind]).reshape(-1)
    got = dequant.decode(torch.from_numpy(raw.reshape(-1)), kind)
    assert got.dtype is torch.float32
    assert got.numpy().tobytes() == want.tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_quantised_weights(kind: str) -> None:
    values = np.random.default_rng(12).standard_normal((8, 96), dtype=np.float32)
    raw = quantize(values, GGMLQuantizationType[kind])
    want = dequantize(raw, GGMLQuantizationType[kind])
    got = dequant.decode(torch.from_numpy(raw.view(np.uint8).reshape(-1)), kind).to(torch.float32)
    assert got.view(8, 96).numpy().tobytes() == want.astype(np.float32).tobytes()
    assert dequant.stored_bytes(kind, values.size) == raw.nbytes


@pytest.mark.parametrize(
    ("kind", "dtype"), [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)]
)
def test_plain_types_are_views_and_survive_odd_offsets(kind: str, dtype: torch.dtype) -> None:
    values = torch.arange(10).to(dtype)
    raw = values.view(torch.uint8)
    assert dequant.decode(raw, kind).data_ptr() == raw.data_ptr()
    shifted = torch.cat((torch.zeros(1, dtype=torch.uint8), raw))[1:]
    assert torch.equal(dequant.decode(shifted, kind), values)
