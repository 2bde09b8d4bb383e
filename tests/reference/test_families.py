"""Every family against transformers on the same random folder: logits given the same ids, over chunks and decode."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pdserve.engine.numerics import LinearKind, Precision
from pdserve.engine.torch_runner import TorchRunner
from pdserve.modelstore.model_facts import read_facts
from tests.support.random_families import (
    FAMILIES,
    LONGROPE,
    VOCAB_SIZE,
    WINDOW,
    save_random,
    save_with_images,
)
from tests.unit.engine_torch.driving import Stream, advance_with_logits, make_runner

LOGITS_WITHIN = 1e-3
NUM_TOKENS = 8
# What bfloat16 means on CPUs without and with instructions for it.
PRECISIONS = [
    Precision("bfloat16", torch.float32, torch.bfloat16, LinearKind.FBGEMM_HALF),
    Precision("bfloat16", torch.bfloat16, torch.bfloat16, LinearKind.PLAIN),
]
LENGTH = 150


def reference_logits(
    folder: Path, ids: list[int], dtype: torch.dtype = torch.float32, **settings: Any
) -> Tensor:
    """transformers' logits of all positions, in one pass."""
    from transformers import AutoModelForCausalLM

    models: Any = AutoModelForCausalLM
    model = models.from_pretrained(str(folder), dtype=dtype, attn_implementation="eager").eval()
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([ids]), **settings).logits[0]
    return logits


@pytest.mark.parametrize("deterministic", [False, True], ids=["batched", "tiled"])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal(name: str, deterministic: bool, tmp_path: Path) -> None:
    """A prompt in chunks of 40 that outgrows the window, then tokens one by one beside a shorter sequence."""
    folder = save_random(name, tmp_path)
    source = random.Random(2)
    long, short = (
        Stream([source.randrange(3, VOCAB_SIZE) for _ in range(length)], list(range(first, first + 12)))
        for length, first in ((LENGTH, 0), (7, 12))
    )
    runner = make_runner(folder, deterministic=deterministic)
    given: dict[int, list[Tensor]] = {0: [], 1: []}
    while len(given[0]) < NUM_TOKENS:
        logits = advance_with_logits(runner, [(long, 40), (short, 40)])
        for index, row in enumerate(logits):
            if row is not None:
                given[index].append(row)
    for index, stream in enumerate((long, short)):
        ours = torch.stack(given[index])
        theirs = reference_logits(folder, stream.ids[:-1])[-len(ours) :]
        assert float((ours - theirs).abs().max()) < LOGITS_WITHIN
        assert float(theirs.std()) > 0.1


# What transformers 4 wrote instead of what transformers 5 writes: keys that go, and those that come.
OLDER: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "llama yarn": (
        ("rope_parameters",),
        {
            "rope_theta": 10_000.0,
            "rope_scaling": {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 128},
        },
    ),
    "qwen2 upper windows": (("layer_types", "rope_parameters"), {"rope_theta": 500.0}),
    "gemma3": (
        ("layer_types", "rope_parameters"),
        {
            "rope_theta": 1e6,
            "rope_local_base_freq": 5_000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "sliding_window_pattern": 3,
        },
    ),
    "phi4 mini": (
        ("rope_parameters",),
        {
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.75,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": LONGROPE["short_factor"],
                "long_factor": LONGROPE["long_factor"],
            },
        },
    ),
}


@pytest.mark.parametrize("name", OLDER)
def test_older_words(name: str, tmp_path: Path) -> None:
    folder = save_random(name, tmp_path)
    gone, come = OLDER[name]
    config = json.loads((folder / "config.json").read_text())
    config = {key: value for key, value in config.items() if key not in gone} | come
    (folder / "config.json").write_text(json.dumps(config))
    stream, ours = decoded(make_runner(folder))
    theirs = reference_logits(folder, stream.ids[:-1])[-len(ours) :]
    assert float((ours - theirs).abs().max()) < LOGITS_WITHIN


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_head_that_is_stored_counts_though_the_config_ties_it(name: str, tmp_path: Path) -> None:
    folder = save_random(name, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = torch.randn_like(tensors["model.embed_tokens.weight"]) / 10
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
    assert not read_facts(folder).tied_embeddings
    stream, ours = decoded(make_runner(folder))
    theirs = reference_logits(folder, stream.ids[:-1])[-len(ours) :]
    assert float((ours - theirs).abs().max()) < LOGITS_WITHIN


def test_long_contexts_of_longrope(tmp_path: Path) -> None:
    """transformers turns to the long factors as soon as a text is longer than the original window."""
    folder = save_random("phi4 mini", tmp_path, original_max_position_embeddings=64)
    runner = make_runner(folder, long_context=True)
    stream, ours = decoded(runner)
    theirs = reference_logits(folder, stream.ids[:-1])[-len(ours) :]
    assert float((ours - theirs).abs().max()) < LOGITS_WITHIN
    usual = make_runner(folder)
    assert (usual.card.window_tokens, runner.card.window_tokens) == (64, 2048)
    assert usual.card.weights_fingerprint != runner.card.weights_fingerprint  # they don't share KV


def test_the_text_part_of_a_model_that_sees_images(tmp_path: Path) -> None:
    folder = save_with_images(tmp_path)
    stream, ours = decoded(make_runner(folder))
    theirs = reference_logits(folder, stream.ids[:-1])[-len(ours) :]
    assert float((ours - theirs).abs().max()) < LOGITS_WITHIN
    facts = read_facts(folder)
    assert facts.architecture == "Gemma3ForConditionalGeneration"
    assert (facts.num_layers, facts.sliding_window, facts.tied_embeddings) == (6, WINDOW, True)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_part_under_the_names_of_any_year(prefix: str, tmp_path: Path) -> None:
    folder = save_with_images(tmp_path)
    _, ours = decoded(make_runner(folder))
    path = folder / "model.safetensors"
    tensors = load_file(path)
    names = {
        name: re.sub(r"^(language_model\.model\.|model\.language_model\.)", prefix, name) for name in tensors
    }
    assert any(name.startswith(prefix) for name in names.values())
    save_file({names[name]: tensor for name, tensor in tensors.items()}, path, {"format": "pt"})
    assert read_facts(folder).num_layers == 6
    _, renamed = decoded(make_runner(folder))
    assert torch.equal(ours, renamed)


@pytest.mark.parametrize("deterministic", [False, True], ids=["batched", "tiled"])
def test_attention_scores_are_capped_where_the_config_says_so(deterministic: bool, tmp_path: Path) -> None:
    """transformers reads this key for Gemma 3 and leaves it to the caller to pass it on."""
    folder = save_random("gemma3", tmp_path, attn_logit_softcapping=0.7)
    assert json.loads((folder / "config.json").read_text())["attn_logit_softcapping"] == 0.7
    stream, ours = decoded(make_runner(folder, deterministic=deterministic))
    capped, plain = (
        reference_logits(folder, stream.ids[:-1], softcap=softcap)[-len(ours) :] for softcap in (0.7, None)
    )
    assert float((ours - capped).abs().max()) < LOGITS_WITHIN
    assert float((ours - plain).abs().max()) > 10 * LOGITS_WITHIN


@pytest.mark.parametrize(
    "name", ["llama yarn", "mistral", "qwen2 upper windows", "qwen3", "gemma3 capped", "phi4 mini"]
)
@pytest.mark.parametrize("precision", PRECISIONS, ids=lambda precision: precision.linear.value)
def test_bfloat16_errs_no_more_than_transformers(name: str, precision: Precision, tmp_path: Path) -> None:
    """Root mean square over all logits, against float32 on the same bfloat16 weights."""
    folder = save_random(name, tmp_path, dtype=torch.bfloat16)
    stream, ours = decoded(make_runner(folder, dtype="bfloat16", precision=precision))
    exact = reference_logits(folder, stream.ids[:-1])[-len(ours) :]
    theirs = reference_logits(folder, stream.ids[:-1], torch.bfloat16)[-len(ours) :]
    assert rms(ours - exact) <= 1.5 * rms(theirs.float() - exact)


def decoded(runner: TorchRunner) -> tuple[Stream, Tensor]:
    """A random sequence behind a prompt in chunks and some tokens, and the logits of these."""
    source = random.Random(2)
    stream = Stream([source.randrange(3, VOCAB_SIZE) for _ in range(LENGTH)], list(range(12)))
    given = [advance_with_logits(runner, [(stream, 40)])[0] for _ in range(8)]
    return stream, torch.stack([logits for logits in given if logits is not None])


def rms(values: Tensor) -> float:
    return float(values.double().pow(2).mean().sqrt())
