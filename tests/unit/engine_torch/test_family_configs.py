"""What each family's config.json means, in older and newer words, and the one line that a broken value gives."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from pdserve.engine.config_reader import load_config
from pdserve.engine.model_config import ModelConfig, RopeConfig
from pdserve.engine.models import MODELS
from pdserve.modelstore.errors import BadModel
from tests.unit.engine_torch.random_model import SMALL

PATTERN = ["sliding_attention", "full_attention"]


def load(folder: Path, family: str, **changes: Any) -> ModelConfig:
    """SMALL's config as another class; `...` takes a key away."""
    changed = SMALL | {"architectures": [f"{family}ForCausalLM"]} | changes
    config = {key: value for key, value in changed.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    return load_config(folder, MODELS)


def test_llama_has_none_of_it(tmp_path: Path) -> None:
    config = load(tmp_path, "Llama", sliding_window=8)
    assert (config.windows, config.local_rope, config.rotary_dim) == ((0, 0), None, 16)
    assert (config.attention_scale, config.embedding_scale) == (0.25, 1.0)
    assert not (config.has_qk_norm or config.has_post_norms or config.qkv_bias or config.final_softcap)


@pytest.mark.parametrize(("window", "want"), [(..., 4096), (None, 0), (7, 7)])
def test_mistral_window(tmp_path: Path, window: Any, want: int) -> None:
    assert load(tmp_path, "Mistral", sliding_window=window).windows == (want, want)


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3"])
@pytest.mark.parametrize(
    ("changes", "want"),
    [
        ({}, (0, 0)),
        ({"sliding_window": 8, "max_window_layers": 1}, (0, 0)),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, (0, 8)),
        ({"use_sliding_window": True, "sliding_window": 8}, (0, 0)),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": None}, (0, 0)),
        ({"use_sliding_window": True, "sliding_window": 8, "layer_types": PATTERN}, (8, 0)),
        ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, (0, 0)),
        ({"layer_types": ["full_attention"] * 2}, (0, 0)),
    ],
)
def test_qwen_windows(tmp_path: Path, family: str, changes: dict[str, Any], want: tuple[int, ...]) -> None:
    config = load(tmp_path, family, **changes)
    assert config.windows == want
    assert config.qkv_bias == (family == "Qwen2")
    assert config.has_qk_norm == (family == "Qwen3")


OLD_GEMMA = {
    "hidden_act": ...,
    "tie_word_embeddings": ...,
    "num_hidden_layers": 7,
    "query_pre_attn_scalar": 100,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}
NEW_GEMMA = OLD_GEMMA | {
    "sliding_window_pattern": ...,
    "rope_theta": ...,
    "rope_local_base_freq": ...,
    "rope_scaling": ...,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}


@pytest.mark.parametrize("words", [OLD_GEMMA, NEW_GEMMA], ids=["older", "newer"])
def test_gemma3(tmp_path: Path, words: dict[str, Any]) -> None:
    config = load(tmp_path, "Gemma3", **words)
    assert config.windows == (512,) * 5 + (0, 512)
    assert config.rope == RopeConfig(base=1e6, kind="linear", factor=8.0, original_positions=2048)
    assert config.local_rope == RopeConfig(base=1e4, original_positions=2048)
    assert (config.attention_scale, config.embedding_scale) == (0.1, math.sqrt(96))
    assert (config.attention_softcap, config.final_softcap) == (0.0, 0.0)
    assert (config.activation, config.norm_offset, config.tied_embeddings) == ("gelu_tanh", 1.0, True)
    assert config.has_qk_norm and config.has_post_norms


def test_gemma3_caps(tmp_path: Path) -> None:
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30}
    config = load(tmp_path, "Gemma3", **OLD_GEMMA, **caps)
    assert (config.attention_softcap, config.final_softcap) == (50.0, 30.0)


def test_gemma3_with_images_as_it_is_published(tmp_path: Path) -> None:
    """Its text_config leaves out what is the default of its class."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10_240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    whole = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "text_config": text,
    }
    (tmp_path / "config.json").write_text(json.dumps(whole))
    config = load_config(tmp_path, MODELS)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262_208)
    assert (config.max_positions, config.tied_embeddings) == (131_072, True)
    assert config.windows == ((1024,) * 5 + (0,)) * 5 + (1024,) * 4
    assert config.rope == RopeConfig(base=1e6, kind="linear", factor=8.0, original_positions=131_072)
    assert config.local_rope == RopeConfig(base=1e4, original_positions=131_072)
    assert config.attention_scale == 256**-0.5


LONGROPE: dict[str, Any] = {
    "type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [2.0] * 6,
}


def test_phi3_parts_of_heads_and_longrope(tmp_path: Path) -> None:
    """The window is that of the short factors."""
    changes = {"partial_rotary_factor": 0.75, "original_max_position_embeddings": 512}
    config = load(tmp_path, "Phi3", **changes, rope_scaling=LONGROPE, rms_norm_eps=...)
    assert (config.rotary_dim, config.max_positions, config.norm_eps) == (12, 512, 1e-5)
    assert config.rope.divisors == tuple(LONGROPE["short_factor"])
    assert config.rope.attention_factor == math.sqrt(1 + math.log(2048 / 512) / math.log(512))
    stretched = config.stretched()
    assert (stretched.max_positions, stretched.rope.divisors) == (2048, (2.0,) * 6)
    assert load(tmp_path, "Phi3").stretched() == load(tmp_path, "Phi3")
    for name in ("su", "yarn"):  # as first files called it
        assert (
            load(tmp_path, "Phi3", **changes, rope_scaling=LONGROPE | {"type": name}).rope.kind == "longrope"
        )
    newer = {**LONGROPE, "rope_theta": 1e4, "partial_rotary_factor": 0.75, "attention_factor": 1.25}
    config = load(tmp_path, "Phi3", original_max_position_embeddings=512, rope_parameters=newer)
    assert (config.rotary_dim, config.rope.attention_factor) == (12, 1.25)
    assert load(tmp_path, "Phi3").max_positions == 2048


def test_yarn(tmp_path: Path) -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    rope = load(tmp_path, "Qwen2", rope_scaling=yarn, rope_theta=1e6).rope
    assert rope == RopeConfig(
        base=1e6,
        kind="yarn",
        factor=4.0,
        original_positions=512,
        attention_factor=0.1 * math.log(4.0) + 1.0,
    )


@pytest.mark.parametrize(
    ("positions", "factor", "want"), [(32_768, 4.0, 131_072), (40_960, 4.0, 131_072), (163_840, 4.0, 163_840)]
)
def test_yarn_as_model_cards_write_it_widens_the_window(
    positions: int, factor: float, want: int, tmp_path: Path
) -> None:
    yarn = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": 32_768}
    config = load(tmp_path, "Qwen3", rope_scaling=yarn, max_position_embeddings=positions)
    assert (config.max_positions, config.rope.factor) == (want, factor)


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("Llama", {"num_hidden_layers": 10**12}, "key=num_hidden_layers, value=1000000000000"),
        ("Qwen2", {"num_hidden_layers": 20_000}, "more layers than any model has (key=num_hidden_layers"),
        ("Llama", {"head_dim": 7}, "head size must be even"),
        ("Mistral", {"sliding_window": "wide"}, "key=sliding_window, value=wide"),
        ("Mistral", {"sliding_window": 0}, "key=sliding_window, value=0"),
        ("Qwen2", {"use_sliding_window": 1}, "key=use_sliding_window, value=1"),
        ("Qwen2", {"max_window_layers": -1}, "key=max_window_layers, value=-1"),
        ("Qwen2", {"layer_types": ["full_attention"]}, "key=layer_types"),
        ("Qwen2", {"layer_types": PATTERN}, "key=sliding_window, value="),
        (
            "Qwen3",
            {"layer_types": ["linear_attention"] * 2},
            "key=layer_types, value=linear_attention, supported=full_attention, sliding_attention",
        ),
        ("Qwen3", {"rope_parameters": {"full_attention": {}}}, "key=rope_parameters.full_attention"),
        ("Qwen3", {"attention_bias": "no"}, "key=attention_bias, value=no"),
        ("Llama", {"partial_rotary_factor": 0.5}, "key=partial_rotary_factor, value=0.5"),
        ("Llama", {"rope_scaling": "linear"}, "key=rope_scaling, value=linear"),
        ("Llama", {"rope_scaling": {"rope_type": "linear"}}, "key=rope_scaling.factor, value=None"),
        ("Llama", {"rope_theta": 1.0}, "a base above 1"),
        (
            "Llama",
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": "x"}},
            "key=rope_scaling.beta_fast, value=x",
        ),
        ("Gemma3", {"hidden_activation": "relu"}, "key=hidden_activation, value=relu"),
        ("Gemma3", {"sliding_window": None}, "key=sliding_window, value=None"),
        ("Gemma3", {"final_logit_softcapping": -1}, "key=final_logit_softcapping, value=-1"),
        ("Gemma3", {"use_bidirectional_attention": True}, "key=use_bidirectional_attention, value=True"),
        (
            "Gemma3",
            {"rope_parameters": {"sliding_attention": {"rope_theta": "x"}}},
            "key=rope_parameters.sliding_attention.rope_theta, value=x",
        ),
        ("Phi3", {"partial_rotary_factor": 0.7}, "key=partial_rotary_factor, value=0.7, turned=11"),
        ("Phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "key=rope_scaling.type, value=linear"),
        ("Phi3", {"rope_scaling": LONGROPE}, "key=original_max_position_embeddings, value=None"),
        (
            "Phi3",
            {"rope_scaling": LONGROPE, "original_max_position_embeddings": 64},
            "key=rope_scaling.short_factor",
        ),
        (
            "Phi3",
            {
                "head_dim": 12,
                "original_max_position_embeddings": 64,
                "rope_scaling": LONGROPE | {"short_factor": [1, 1, 0, 1, 1, 1]},
            },
            "key=rope_scaling.short_factor.2, value=0",
        ),
    ],
)
def test_one_line_names_the_key(tmp_path: Path, family: str, changes: dict[str, Any], words: str) -> None:
    own = {"hidden_act": ...} if family == "Gemma3" else {}
    with pytest.raises(BadModel) as caught:
        load(tmp_path, family, **own, **changes)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
