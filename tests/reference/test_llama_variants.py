"""What a Llama config can ask for, on small random models: logits equal transformers' on the same folder."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pdserve.engine.config_reader import load_config
from pdserve.engine.model_config import RopeConfig
from pdserve.engine.models import MODELS
from pdserve.engine.rotary import rope_frequencies
from tests.unit.engine_torch.driving import Stream, advance_with_logits, make_runner
from tests.unit.engine_torch.random_model import SMALL, write_random_model

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "shards": {"shards": 3},
    "stored in bfloat16": {"dtype": torch.bfloat16},
    "no grouping": {"num_key_value_heads": 6},
    "one KV head": {"num_key_value_heads": 1},
    "heads wider than the model": {"head_dim": 32},
    "heads of 6": {"head_dim": 6},
    "heads of 90": {"head_dim": 90},
    "head of its own": {"tie_word_embeddings": False},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "rope linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "rope dynamic inside the window": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "rope llama3": {"rope_theta": 500000.0, "rope_scaling": LLAMA3},
    "rope_parameters": {"rope_parameters": LLAMA3 | {"rope_theta": 500000.0}},
}
LENGTH = 150


def reference_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    models: Any = AutoModelForCausalLM
    return models.from_pretrained(str(folder), dtype=torch.float32).eval()


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal(name: str, tmp_path: Path) -> None:
    folder = write_random_model(tmp_path, seed=6, **VARIANTS[name])
    source = random.Random(2)
    stream = Stream([source.randrange(SMALL["vocab_size"]) for _ in range(LENGTH)], list(range(12)))
    runner = make_runner(folder)
    given = [advance_with_logits(runner, [(stream, 64)])[0] for _ in range(12)]
    ours = torch.stack([logits for logits in given if logits is not None])
    with torch.inference_mode():
        everything: Tensor = reference_model(folder)(torch.tensor([stream.ids[:-1]])).logits[0]
    theirs = everything[LENGTH - 1 :]
    assert ours.shape == theirs.shape == (10, SMALL["vocab_size"])
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["plain", "rope linear", "rope llama3"])
def test_frequencies_equal(name: str, tmp_path: Path) -> None:
    folder = write_random_model(tmp_path, **VARIANTS[name])
    rope: RopeConfig = load_config(folder, MODELS).rope
    want = reference_model(folder).model.rotary_emb.inv_freq
    torch.testing.assert_close(rope_frequencies(rope, SMALL["head_dim"]), want, atol=0, rtol=1e-6)
