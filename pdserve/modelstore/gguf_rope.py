"""How a GGUF file stretches its rotary embedding, in Hugging Face's words."""

from __future__ import annotations

import math
from typing import Any

from pdserve.decimals import shortest
from pdserve.errors import Incompatible
from pdserve.modelstore.gguf_file import GgufFile

# The constants of Llama 3.1's RoPE scaling; GGUF files carry only the table computed from them.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_OLD_CONTEXT = 1.0, 4.0, 8192


def rope_scaling(file: GgufFile, head_dim: int, rope_theta: float) -> dict[str, Any] | None:
    """The value of `rope_scaling` in config.json. Raises Incompatible for a kind that isn't known, by name."""
    table = file.floats("rope_freqs.weight")
    if table is not None:
        return _llama3(table, head_dim, rope_theta)
    long = file.floats("rope_factors_long.weight")
    if long is not None:
        return _longrope(file, long)
    kind = file.typed(file.key("rope.scaling.type"), str, "none")
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": _factor(file)}
    if kind == "yarn":
        original = file.typed(file.key("rope.scaling.original_context_length"), int)
        return {"rope_type": "yarn", "factor": _factor(file), "original_max_position_embeddings": original}
    raise Incompatible(
        "GGUF rope scaling is not supported", got=kind, supported="none, linear, llama3, longrope, yarn"
    )


def _longrope(file: GgufFile, long: list[float]) -> dict[str, Any]:
    """Phi-3's: a divisor for each frequency, one list for short contexts and one for long ones."""
    short = file.floats("rope_factors_short.weight")
    if short is None or len(short) != len(long):
        raise Incompatible("GGUF rope_factors_short doesn't fit rope_factors_long", file=file.path.name)
    scaling: dict[str, Any] = {
        "rope_type": "longrope",
        "short_factor": [shortest(value) for value in short],
        "long_factor": [shortest(value) for value in long],
    }
    usual = _longrope_attention(file)
    written = file.typed(file.key("rope.scaling.attn_factor"), float, usual)
    if abs(written - usual) > 1e-4:
        scaling["attention_factor"] = shortest(written)
    return scaling


def _factor(file: GgufFile) -> float:
    return shortest(file.typed(file.key("rope.scaling.factor"), float))


def _longrope_attention(file: GgufFile) -> float:
    """What a config without `attention_factor` means. Source: LongRoPE, arXiv:2402.13753, as transformers has it."""
    context = file.typed(file.key("context_length"), int)
    original = file.typed(file.key("rope.scaling.original_context_length"), int, context)
    return (
        1.0
        if context <= original or original <= 1
        else math.sqrt(1 + math.log(context / original) / math.log(original))
    )


def _llama3(table: list[float], head_dim: int, rope_theta: float) -> dict[str, Any]:
    """Find the parameters of a table of frequency divisors, and prove them by computing it again.

    table  [head_dim / 2]: what each inverse frequency is divided by, as llama.cpp writes it
    Source: the Llama 3.1 model card's `rope_scaling`, and the formula in "RoPE scaling" of its reference code.
    """
    factor = round(max(table), 4)
    for index, got in enumerate(table):
        wavelength = 2 * math.pi * rope_theta ** (2 * index / head_dim)
        want = _llama3_divisor(wavelength, factor)
        if abs(want - got) > 1e-3 * want:
            raise Incompatible("GGUF rope table follows no known scaling", index=index, want=want, got=got)
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_OLD_CONTEXT,
    }


def _llama3_divisor(wavelength: float, factor: float) -> float:
    turns = _LLAMA3_OLD_CONTEXT / wavelength
    if turns > _LLAMA3_HIGH:
        return 1.0
    if turns < _LLAMA3_LOW:
        return factor
    smooth = (turns - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
    return 1 / ((1 - smooth) / factor + smooth)
