"""Which experts a config.json asks for, and the one line that a wrong value gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pdserve.engine.config_reader import load_config
from pdserve.engine.model_config import ExpertsConfig, ModelConfig
from pdserve.engine.models import MODELS
from pdserve.modelstore.errors import BadModel
from tests.unit.engine_torch.random_model import SMALL

MIXTRAL = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2}
QWEN = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 6,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 32,
}


def load(folder: Path, config: dict[str, Any], **changes: Any) -> ModelConfig:
    whole = SMALL | config | changes
    (folder / "config.json").write_text(
        json.dumps({key: whole[key] for key in whole if whole[key] is not ...})
    )
    return load_config(folder, MODELS)


def test_mixtral(tmp_path: Path) -> None:
    config = load(tmp_path, MIXTRAL, rope_theta=...)
    assert config.experts == ExpertsConfig(
        num_experts=8, num_chosen=2, ffn_size=160, is_normalised=True, layers=(True, True)
    )
    assert (config.windows, config.rope.base) == ((0, 0), 1e6)
    other = load(tmp_path, MIXTRAL, num_experts_per_tok=..., sliding_window=64)
    assert other.experts == config.experts
    assert other.windows == (64, 64)


def test_qwen3_moe(tmp_path: Path) -> None:
    config = load(tmp_path, QWEN, num_experts_per_tok=...)
    assert config.experts == ExpertsConfig(
        num_experts=128, num_chosen=8, ffn_size=32, is_normalised=False, layers=(True,) * 6
    )
    assert config.has_qk_norm
    newer = load(tmp_path, QWEN, num_experts=..., num_local_experts=128, norm_topk_prob=True)
    assert newer.experts is not None
    assert (newer.experts.num_experts, newer.experts.is_normalised) == (128, True)


@pytest.mark.parametrize(
    ("step", "dense", "want"),
    [
        (1, None, "111111"),
        (2, [], "010101"),
        (3, [5], "001000"),
        (1, [0, 4], "011101"),
        (7, [], "000000"),
    ],
)
def test_layers_without_experts(tmp_path: Path, step: int, dense: list[int] | None, want: str) -> None:
    config = load(tmp_path, QWEN, decoder_sparse_step=step, mlp_only_layers=dense)
    assert config.experts is not None
    assert "".join("01"[is_sparse] for is_sparse in config.experts.layers) == want


@pytest.mark.parametrize(
    ("config", "changes", "said"),
    [
        (MIXTRAL, {"num_local_experts": 0}, "key=num_local_experts, value=0"),
        (MIXTRAL, {"num_local_experts": ...}, "key=num_experts, value=None"),
        (MIXTRAL, {"num_experts_per_tok": 9}, "key=num_experts_per_tok, value=9, num_experts=8"),
        (MIXTRAL, {"num_experts_per_tok": 1.5}, "key=num_experts_per_tok, value=1.5"),
        (MIXTRAL, {"hidden_act": "gelu"}, "key=hidden_act, value=gelu"),
        (QWEN, {"moe_intermediate_size": None}, "key=moe_intermediate_size, value=None"),
        (QWEN, {"num_experts": True}, "key=num_experts, value=True"),
        (QWEN, {"norm_topk_prob": "yes"}, "key=norm_topk_prob, value=yes"),
        (QWEN, {"decoder_sparse_step": 0}, "key=decoder_sparse_step, value=0"),
        (QWEN, {"mlp_only_layers": 3}, "key=mlp_only_layers, value=3"),
        (QWEN, {"mlp_only_layers": [6]}, "key=mlp_only_layers, value=6, num_layers=6"),
        (QWEN, {"mlp_only_layers": ["0"]}, "key=mlp_only_layers, value=0, num_layers=6"),
    ],
)
def test_one_line_names_key_and_value(
    tmp_path: Path, config: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(BadModel) as caught:
        load(tmp_path, config, **changes)
    assert said in str(caught.value)
