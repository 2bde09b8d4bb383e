"""config.json: what is read, and the one line a broken one gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pdserve.engine.config_reader import load_config
from pdserve.engine.model_config import ModelConfig, RopeConfig
from pdserve.engine.models import MODELS
from pdserve.errors import Code
from pdserve.modelstore.errors import BadModel
from tests.unit.engine_torch.random_model import SMALL


def load(folder: Path, generation: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
    config = {key: value for key, value in (SMALL | changes).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return load_config(folder, MODELS)


def test_sizes(tmp_path: Path) -> None:
    config = load(tmp_path)
    assert (config.num_heads, config.num_kv_heads, config.group_size, config.head_dim) == (6, 2, 3, 16)
    assert config.tied_embeddings


def test_defaults_of_older_files(tmp_path: Path) -> None:
    config = load(tmp_path, num_key_value_heads=..., head_dim=..., tie_word_embeddings=..., rope_theta=...)
    assert (config.num_kv_heads, config.head_dim, config.tied_embeddings) == (6, 16, False)
    assert config.rope == RopeConfig(original_positions=2048)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        ({"rope_scaling": None}, RopeConfig(base=10_000, original_positions=2048)),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}},
            RopeConfig(kind="linear", factor=2, original_positions=2048),
        ),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
            RopeConfig(kind="dynamic", factor=4, original_positions=2048),
        ),
        (
            {"rope_scaling": LLAMA3, "rope_theta": 500000.0},
            RopeConfig(base=500_000, kind="llama3", factor=8, original_positions=8192),
        ),
        (
            {"rope_theta": ..., "rope_parameters": LLAMA3 | {"rope_theta": 500000.0}},
            RopeConfig(base=500_000, kind="llama3", factor=8, original_positions=8192),
        ),
    ],
)
def test_rope(tmp_path: Path, changes: dict[str, Any], want: RopeConfig) -> None:
    assert load(tmp_path, **changes).rope == want


def test_an_unknown_architecture_lists_what_is_supported(tmp_path: Path) -> None:
    with pytest.raises(BadModel) as caught:
        load(tmp_path, architectures=["MambaForCausalLM"])
    assert caught.value.code is Code.FAILED_PRECONDITION
    assert str(caught.value).endswith(f"(architecture=MambaForCausalLM, supported={', '.join(MODELS)})")
    assert "Qwen2ForCausalLM" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ...}, "none given"),
        ({"hidden_size": ...}, "key=hidden_size"),
        ({"num_hidden_layers": 0}, "key=num_hidden_layers, value=0"),
        ({"vocab_size": "many"}, "key=vocab_size, value=many"),
        ({"rms_norm_eps": -1}, "key=rms_norm_eps"),
        ({"num_key_value_heads": 4}, "num_heads=6, num_kv_heads=4"),
        ({"head_dim": 7}, "head_dim=7"),
        ({"hidden_act": "gelu"}, "hidden_act, value=gelu"),
        (
            {"rope_scaling": {"rope_type": "axial", "factor": 2}},
            "key=rope_scaling.rope_type, value=axial, supported=default",
        ),
    ],
)
def test_one_line_names_the_key(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(BadModel) as caught:
        load(tmp_path, **changes)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_are_no_config(tmp_path: Path) -> None:
    with pytest.raises(BadModel, match=r"lacks a file.*config\.json"):
        load_config(tmp_path, MODELS)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(BadModel, match=r"not JSON.*config\.json"):
        load_config(tmp_path, MODELS)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(BadModel, match="not a JSON object"):
        load_config(tmp_path, MODELS)
