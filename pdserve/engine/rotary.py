"""Rotary position embedding: how fast each pair of a head turns, and the turn itself as one complex multiplication.

Heads keep the two halves of a rotated pair side by side (`interleave_pairs`), so a head of D numbers is D/2 complex
ones and position p turns pair i by p·frequency[i]. Queries and keys are permuted alike, so their products are those of
the half-split form that Hugging Face weights are stored in. What isn't turned, behind rotary_dim, is turned by 0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pdserve.engine.model_config import RopeConfig


class Rotary:
    """Turns of one embedding."""

    def __init__(
        self, config: RopeConfig, head_dim: int, rotary_dim: int, device: torch.device | None = None
    ) -> None:
        rest = (head_dim - rotary_dim) // 2
        still = torch.zeros(rest)
        lengths = torch.cat((torch.full((rotary_dim // 2,), config.attention_factor), still + 1.0))
        self._frequencies = torch.cat((rope_frequencies(config, rotary_dim), still)).to(device=device)
        self._lengths = lengths.to(device=device)

    def turns(self, positions: Tensor) -> Tensor:
        """What `rotate_` multiplies by: [tokens, 1, D/2] complex64, for positions [tokens] int64."""
        angles = torch.outer(positions.to(torch.float32), self._frequencies)
        return torch.polar(self._lengths.expand_as(angles), angles).unsqueeze(1)


def drawn_positions(rows: Tensor) -> Tensor:
    """A position of each of some random rows, below 100,000: [rows] int64."""
    return (rows[:, 0].to(torch.float32).abs() * 1000).nan_to_num(0.0, 0.0).clamp(max=1e5).to(torch.int64)


def rotate_(heads: Tensor, turns: Tensor) -> None:
    """Turn queries and keys in place.

    heads  [tokens, heads · D] float32, pairs side by side; may be a part of wider rows of even length
    turns  what `Rotary.turns` gave
    """
    pairs = heads.view(heads.shape[0], -1, turns.shape[-1], 2)
    torch.view_as_complex(pairs).mul_(turns)


def interleave_pairs(weight: Tensor, num_heads: int, rotary_dim: int) -> Tensor:
    """Reorder rows of a query or key projection (its bias, a norm) from half-split pairs to pairs side by side.

    weight      [num_heads · D, …]
    rotary_dim  rows of each head that are such pairs; those behind them stay
    """
    heads = weight.reshape(num_heads, -1, *weight.shape[1:])
    turned = heads[:, :rotary_dim].reshape(num_heads, 2, -1, *weight.shape[1:]).transpose(1, 2)
    if rotary_dim == heads.shape[1]:
        return turned.reshape(weight.shape)
    turned = turned.reshape(num_heads, rotary_dim, *weight.shape[1:])
    return torch.cat((turned, heads[:, rotary_dim:]), dim=1).reshape(weight.shape)


def rope_frequencies(config: RopeConfig, rotary_dim: int) -> Tensor:
    """Radians a position for each of the rotary_dim/2 pairs, float32.

    Source: https://huggingface.co/docs/transformers, "Utilities for Rotary Embedding".
    """
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).to(torch.float32) / rotary_dim
    frequencies = 1.0 / (config.base**exponents)
    if config.kind == "linear":
        return frequencies / config.factor
    if config.kind == "llama3":
        return _llama3(config, frequencies)
    if config.kind == "yarn":
        return _yarn(config, frequencies)
    if config.kind == "longrope":
        return 1.0 / (torch.tensor(config.divisors) * config.base**exponents)
    return frequencies


def _llama3(config: RopeConfig, frequencies: Tensor) -> Tensor:
    wavelengths = 2 * math.pi / frequencies
    longest = config.original_positions / config.low_freq_factor
    shortest = config.original_positions / config.high_freq_factor
    ramp = (config.original_positions / wavelengths - config.low_freq_factor) / (
        config.high_freq_factor - config.low_freq_factor
    )
    slowed = frequencies / config.factor
    between = (1 - ramp) * slowed + ramp * frequencies
    kept = torch.where(wavelengths < shortest, frequencies, between)
    return torch.where(wavelengths > longest, slowed, kept)


def _yarn(config: RopeConfig, frequencies: Tensor) -> Tensor:
    """Pairs that turn more than beta_fast times within the original window stay, those below beta_slow are slowed.

    Source: YaRN, arXiv:2309.00071, "NTK-by-parts".
    """
    dim = 2 * len(frequencies)

    def pair_of(num_turns: float) -> float:
        return (
            dim
            * math.log(config.original_positions / (num_turns * 2 * math.pi))
            / (2 * math.log(config.base))
        )

    first, last = pair_of(config.beta_fast), pair_of(config.beta_slow)
    if config.is_truncated:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001
    slowed_part = ((torch.arange(len(frequencies), dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    return frequencies / config.factor * slowed_part + frequencies * (1 - slowed_part)
