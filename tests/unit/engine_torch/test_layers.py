"""Layers against their definitions."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from pdserve.engine.layers import HeadNorm, RmsNorm, geglu, make_linear, soft_cap_, swiglu
from pdserve.engine.model_config import RopeConfig
from pdserve.engine.numerics import LinearKind, Precision, choose_precision
from pdserve.engine.rotary import Rotary, interleave_pairs, rope_frequencies, rotate_
from pdserve.engine.row_tiles import undivided
from pdserve.engine.stored_matrix import StoredMatrix

FLOAT32 = [
    Precision("float32", torch.float32, torch.float32, kind) for kind in (LinearKind.PLAIN, LinearKind.ONEDNN)
]


def normal(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("precision", [*FLOAT32, choose_precision("float32")], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 7, 40])
def test_float32_linears(precision: Precision, rows: int) -> None:
    x, weight, bias = normal(rows, 64), normal(48, 64, seed=2), normal(48, seed=3)
    want = (x.double() @ weight.double().t() + bias.double()).float()
    torch.testing.assert_close(
        make_linear(precision, StoredMatrix.plain(weight), bias)(x), want, atol=1e-4, rtol=1e-4
    )
    torch.testing.assert_close(
        make_linear(precision, StoredMatrix.plain(weight))(x), want - bias, atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("largest", [1.0, 1e5])
def test_bfloat16_linear_multiplies_by_bfloat16_weights(largest: float) -> None:
    """Also where a weight is too large for float16: then another kind takes over."""
    precision = choose_precision("bfloat16")
    weight = normal(48, 64) * 0.1
    weight[3, 5] = largest
    x = normal(9, 64, seed=2).to(precision.compute)
    want = x.double() @ weight.bfloat16().double().t()
    got = make_linear(precision, StoredMatrix.plain(weight))(x).double()
    scale = 2e-3 if precision.compute is torch.float32 else 2e-2
    assert float((got - want).abs().max() / want.abs().max()) < scale


def test_half_weights_lose_nothing_of_bfloat16() -> None:
    """Every bfloat16 number of a usual size is a float16 number."""
    weight = (normal(200, 200) * 0.05).bfloat16()
    usual = weight[weight.abs() > 6.2e-5]
    assert torch.equal(usual.half().bfloat16(), usual)
    assert float((weight.half().float() - weight.float()).abs().max()) <= 2**-25


def test_rms_norm() -> None:
    x, weight = normal(5, 96) * 3, normal(96, seed=2)
    want = functional.rms_norm(x.double(), (96,), weight.double(), 1e-5)
    torch.testing.assert_close(RmsNorm(weight, 1e-5, torch.float32)(x), want.float())
    tiny = torch.full((1, 96), 1e-6)
    torch.testing.assert_close(
        RmsNorm(weight, 1e-5, torch.float32)(tiny), functional.rms_norm(tiny, (96,), weight, 1e-5)
    )


def test_rms_norm_keeps_bfloat16() -> None:
    x, weight = (normal(5, 96) * 3).bfloat16(), normal(96, seed=2).bfloat16()
    got = RmsNorm(weight, 1e-5, torch.bfloat16)(x)
    assert got.dtype is torch.bfloat16
    want = functional.rms_norm(x.double(), (96,), weight.double(), 1e-5)
    torch.testing.assert_close(got.double(), want, atol=0.05, rtol=0.01)


def test_swiglu() -> None:
    x = normal(4, 20)
    torch.testing.assert_close(swiglu(x), functional.silu(x[:, :10]) * x[:, 10:])


@pytest.mark.parametrize("num_threads", [2, 5, 7, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_undivided_rows_are_independent(num_threads: int, dtype: torch.dtype) -> None:
    """With 5 threads and more the plain functions fail this where a thread's share ends in the middle of a row."""
    gate_up, heads = normal(600, 3072).to(dtype), normal(600, 15 * 64)
    turns = Rotary(RopeConfig(base=10_000.0), 64, 64).turns(torch.arange(600))

    norm = HeadNorm(normal(9, 64, seed=3), normal(3, 64, seed=4), 1e-6)

    def rotated(num_rows: int) -> torch.Tensor:
        turned = heads[:num_rows].clone()
        undivided(norm.apply_)(turned[:, : 12 * 64])
        undivided(rotate_)(turned[:, : 12 * 64], turns[:num_rows])
        return turned

    def capped(num_rows: int) -> torch.Tensor:
        return undivided(soft_cap_)(heads[:num_rows].clone(), 2.0)

    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        activated, turned, all_capped = undivided(swiglu)(gate_up), rotated(600), capped(600)
        by_gelu = undivided(geglu)(gate_up)
        for num_rows in (6, 64, 96, 120, 192, 256, 510):
            assert torch.equal(undivided(swiglu)(gate_up[:num_rows].clone()), activated[:num_rows])
            assert torch.equal(undivided(geglu)(gate_up[:num_rows].clone()), by_gelu[:num_rows])
            assert torch.equal(rotated(num_rows), turned[:num_rows])
            assert torch.equal(capped(num_rows), all_capped[:num_rows])
        assert torch.get_num_threads() == num_threads
    finally:
        torch.set_num_threads(before)


def test_rotation_equals_the_half_split_form() -> None:
    """Permuted weights and complex turns give the same products of queries and keys as Hugging Face's form."""
    heads, size, tokens, hidden = 3, 16, 6, 24
    weight, x = normal(heads * size, hidden), normal(tokens, hidden, seed=2)
    positions = torch.tensor([0, 1, 2, 50, 1000, 5000])
    rotary = Rotary(RopeConfig(base=10_000.0), size, size)
    wide = torch.cat((x @ interleave_pairs(weight, heads, size).t(), torch.ones(tokens, 6)), dim=1)
    rotate_(wide[:, : heads * size], rotary.turns(positions))
    ours = wide[:, :-6].view(tokens, heads, size)

    split = (x @ weight.t()).view(tokens, heads, size)
    angles = torch.outer(positions.float(), rope_frequencies(RopeConfig(base=10_000.0), size)).repeat(1, 2)[
        :, None
    ]
    half = torch.cat((-split[..., size // 2 :], split[..., : size // 2]), dim=-1)
    theirs = split * angles.cos() + half * angles.sin()
    torch.testing.assert_close(
        torch.einsum("qhd,khd->hqk", ours, ours),
        torch.einsum("qhd,khd->hqk", theirs, theirs),
        atol=1e-4,
        rtol=1e-4,
    )
    assert (wide[:, -6:] == 1).all()


def test_interleaving_a_bias() -> None:
    bias = torch.arange(8.0)
    assert interleave_pairs(bias, 2, 4).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_llama3_frequencies_keep_the_fast_and_slow_the_slow() -> None:
    config = RopeConfig(
        base=500_000.0,
        kind="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_positions=8192,
    )
    plain = rope_frequencies(RopeConfig(base=500_000.0), 128)
    scaled = rope_frequencies(config, 128)
    ratio = plain / scaled
    waves = 2 * math.pi / plain
    torch.testing.assert_close(ratio[waves < 8192 / 4], torch.ones_like(ratio[waves < 8192 / 4]))
    torch.testing.assert_close(ratio[waves > 8192], torch.full_like(ratio[waves > 8192], 8.0))
    assert (ratio.diff() >= -1e-6).all()


def test_linear_scaling_divides_positions() -> None:
    plain = rope_frequencies(RopeConfig(), 32)
    torch.testing.assert_close(rope_frequencies(RopeConfig(kind="linear", factor=4.0), 32), plain / 4)
    assert torch.equal(rope_frequencies(RopeConfig(kind="dynamic", factor=4.0), 32), plain)


def test_rms_norm_with_an_offset_multiplies_before_it_rounds() -> None:
    x, weight = normal(5, 96) * 3, normal(96, seed=2) * 0.1
    want = functional.rms_norm(x.double(), (96,), 1 + weight.double(), 1e-5)
    got = RmsNorm(weight, 1e-5, torch.float32, offset=1.0)(x)
    torch.testing.assert_close(got, want.float())
    half = x.bfloat16()
    want = functional.rms_norm(half.double(), (96,), 1 + weight.double(), 1e-5)
    rounded = RmsNorm(weight, 1e-5, torch.bfloat16, offset=1.0)(half)
    assert rounded.dtype is torch.bfloat16
    assert float((rounded.double() / want - 1).abs().max()) < 2**-8  # one rounding to 8 bits


def test_head_norm_works_in_place_on_queries_and_keys() -> None:
    tokens, heads, kv_heads, size = 5, 4, 2, 16
    wide = normal(tokens, (heads + kv_heads + kv_heads) * size)
    rows = wide[:, : (heads + kv_heads) * size].clone().view(tokens, -1, size)
    values = wide[:, (heads + kv_heads) * size :].clone()
    weights = normal(heads + kv_heads, size, seed=2)
    HeadNorm(weights[:heads], weights[heads:], 1e-6).apply_(wide[:, : (heads + kv_heads) * size])
    want = functional.rms_norm(rows.double(), (size,), None, 1e-6) * weights.double()
    got = wide[:, : (heads + kv_heads) * size].view(tokens, -1, size)
    torch.testing.assert_close(got, want.float())
    assert torch.equal(wide[:, (heads + kv_heads) * size :], values)


def test_geglu() -> None:
    x = normal(4, 20)
    gate, up = x.double().chunk(2, dim=-1)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    torch.testing.assert_close(geglu(x), (0.5 * gate * (1 + torch.tanh(inner)) * up).float())


def test_soft_cap() -> None:
    x = normal(4, 20) * 40
    want = 30 * torch.tanh(x.double() / 30)
    torch.testing.assert_close(soft_cap_(x.clone(), 30.0), want.float())


def test_only_a_part_of_each_head_is_turned() -> None:
    """The rest stays where it is, and is not scaled."""
    heads, size, part, tokens = 2, 16, 12, 4
    config = RopeConfig(kind="longrope", divisors=tuple(1.0 + i for i in range(6)), attention_factor=1.3)
    rotary = Rotary(config, size, part)
    split = normal(tokens, heads * size)
    order = interleave_pairs(torch.arange(heads * size), heads, part)
    turned = split[:, order].contiguous()
    rotate_(turned, rotary.turns(torch.arange(tokens) * 100))
    ours = torch.empty_like(turned)
    ours[:, order] = turned
    ours, plain = ours.view(tokens, heads, size), split.view(tokens, heads, size)
    angles = torch.outer(torch.arange(tokens) * 100.0, rope_frequencies(config, part))[:, None]
    left, right = plain[..., : part // 2], plain[..., part // 2 : part]
    want = torch.cat(
        (left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()), dim=-1
    )
    torch.testing.assert_close(ours[..., :part], want * 1.3, atol=1e-5, rtol=1e-5)
    assert torch.equal(ours[..., part:], plain[..., part:])


def test_yarn_keeps_the_fast_and_slows_the_slow() -> None:
    config = RopeConfig(base=1e6, kind="yarn", factor=4.0, original_positions=32_768)
    plain = rope_frequencies(RopeConfig(base=1e6), 128)
    ratio = plain / rope_frequencies(config, 128)
    turns = 32_768 * plain / (2 * math.pi)
    torch.testing.assert_close(ratio[turns > 40], torch.ones_like(ratio[turns > 40]))
    torch.testing.assert_close(ratio[turns < 0.5], torch.full_like(ratio[turns < 0.5], 4.0))
    assert (ratio.diff() >= -1e-6).all()
