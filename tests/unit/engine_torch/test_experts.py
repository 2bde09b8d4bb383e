"""Mixture of experts against its definition, token by token in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from pdserve.engine.experts import Router, SparseFeedForward
from pdserve.engine.models.feed_forward import GatedFeedForward
from pdserve.engine.models.tensors import Projection, stacked
from pdserve.engine.numerics import LinearKind, Precision, choose_precision
from pdserve.engine.row_proof import prove
from pdserve.engine.row_tiles import RowTiles
from pdserve.engine.stored_matrix import StoredMatrix

HIDDEN, FFN = 96, 64
PLAIN = Precision("float32", torch.float32, torch.float32, LinearKind.PLAIN)
Array = npt.NDArray[np.float64]


class World:
    """Random weights of one layer."""

    def __init__(self, num_experts: int, num_chosen: int, *, normalised: bool = True, seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator) / math.sqrt(shape[-1])

        self.gate = random(num_experts, HIDDEN) * 3
        self.experts = [
            (random(FFN, HIDDEN), random(FFN, HIDDEN), random(HIDDEN, FFN)) for _ in range(num_experts)
        ]
        self.num_chosen = num_chosen
        self.normalised = normalised

    def layer(self, precision: Precision) -> SparseFeedForward:
        experts = [
            GatedFeedForward(
                stacked(Projection(StoredMatrix.plain(gate), None), Projection(StoredMatrix.plain(up), None)),
                Projection(StoredMatrix.plain(down), None),
                "silu",
                precision,
            )
            for gate, up, down in self.experts
        ]
        return SparseFeedForward(Router(precision, self.gate, self.num_chosen, self.normalised), experts)

    def oracle(self, x: Tensor) -> Array:
        """The definition: one token after the other, one expert after the other."""
        rows = x.double().numpy()
        return np.stack([self._of_token(row) for row in rows])

    def _of_token(self, row: Array) -> Array:
        logits = self.gate.double().numpy() @ row
        probabilities = np.exp(logits - logits.max())
        probabilities /= probabilities.sum()
        chosen = sorted(range(len(logits)), key=lambda expert: (-probabilities[expert], expert))
        chosen = chosen[: self.num_chosen]
        share = sum(probabilities[expert] for expert in chosen) if self.normalised else 1.0
        total = np.zeros(HIDDEN)
        for expert in chosen:
            gate, up, down = (matrix.double().numpy() for matrix in self.experts[expert])
            gated = gate @ row
            total += probabilities[expert] / share * (down @ (gated / (1 + np.exp(-gated)) * (up @ row)))
        return total


def tokens(count: int, seed: int = 5) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("precision", [PLAIN, choose_precision("float32")], ids=str)
@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize(("num_experts", "num_chosen"), [(4, 2), (16, 5), (3, 3), (8, 1), (1, 1)])
@pytest.mark.parametrize("num_tokens", [1, 2, 33])
def test_equals_the_definition(
    precision: Precision, normalised: bool, num_experts: int, num_chosen: int, num_tokens: int
) -> None:
    world = World(num_experts, num_chosen, normalised=normalised)
    x = tokens(num_tokens)
    before = x.clone()
    got = world.layer(precision)(x)
    np.testing.assert_allclose(got.numpy(), world.oracle(x), rtol=1e-4, atol=1e-5)
    assert torch.equal(x, before)


def test_bfloat16_weights_and_activations() -> None:
    world, precision = World(8, 3), choose_precision("bfloat16")
    world.gate = world.gate.bfloat16().float()
    world.experts = [(gate.bfloat16(), up.bfloat16(), down.bfloat16()) for gate, up, down in world.experts]
    x = tokens(40).bfloat16()
    got = world.layer(precision)(x.to(precision.compute)).double().numpy()
    want = world.oracle(x)
    assert np.abs(got - want).max() < 0.02 * np.abs(want).max()


def test_all_tokens_choose_the_same_expert() -> None:
    world = World(4, 1)
    x = tokens(20).abs()
    world.gate = torch.zeros_like(world.gate)
    world.gate[2] = 1.0
    np.testing.assert_allclose(world.layer(PLAIN)(x).numpy(), world.oracle(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_tokens", [1, 7, 64, 500])
@pytest.mark.parametrize("num_experts", [4, 16, 128])
def test_ties_go_to_the_lower_numbers(num_tokens: int, num_experts: int) -> None:
    """All equal; and pairs of equals, where more than one pair is wanted."""
    equal = Router(PLAIN, torch.zeros(num_experts, HIDDEN), 3, normalised=True)
    weights, chosen = equal.choose(tokens(num_tokens))
    assert chosen.tolist() == [[0, 1, 2]] * num_tokens
    torch.testing.assert_close(weights, torch.full((num_tokens, 3), 1 / 3))

    gate = World(num_experts // 2, 1).gate.repeat(2, 1)  # expert e and e + half are equal
    weights, chosen = Router(PLAIN, gate, 4, normalised=False).choose(tokens(num_tokens))
    assert torch.equal(chosen[:, 1], chosen[:, 0] + num_experts // 2)
    assert torch.equal(chosen[:, 3], chosen[:, 2] + num_experts // 2)
    assert torch.equal(weights[:, 0], weights[:, 1])


def test_a_broken_row_breaks_no_other() -> None:
    layer, x = World(8, 2).layer(PLAIN), tokens(9)
    want = layer(x)
    broken = x.clone()
    broken[4] = float("nan")
    got = layer(broken)
    assert got[4].isnan().all()
    rest = torch.arange(9) != 4
    torch.testing.assert_close(got[rest], want[rest])


DETERMINISTIC = {
    "float32": choose_precision("float32"),
    "float32 plain": PLAIN,
    "bfloat16": choose_precision("bfloat16"),
    "bfloat16 plain": Precision("bfloat16", torch.bfloat16, torch.bfloat16, LinearKind.PLAIN),
}


@pytest.mark.parametrize("name", DETERMINISTIC)
@pytest.mark.parametrize("num_threads", [1, 7])
def test_bits_depend_on_the_row_alone(name: str, num_threads: int) -> None:
    tiles = RowTiles()
    precision = replace(DETERMINISTIC[name], tiles=tiles)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        layer = World(16, 4).layer(precision)
        prove(tiles, precision.compute)
        x = tokens(200).to(precision.compute)
        whole = layer(x)
        source = torch.Generator().manual_seed(3)
        for count in (1, 2, 3, 5, 8, 13, 21, 34, 150):
            picked = torch.randperm(len(x), generator=source)[:count]
            assert torch.equal(layer(x[picked]), whole[picked]), count
    finally:
        torch.set_num_threads(before)
