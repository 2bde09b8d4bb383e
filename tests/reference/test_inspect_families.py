"""`pdserve model inspect` tells of every model class what transformers says of the same model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest

from pdserve.cli.main import main
from pdserve.modelstore import resolve
from pdserve.tokenizer import Tokenizer
from tests.reference.test_gguf_families import FAMILIES, saved
from tests.support.gguf_models import write_model

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def inspected(model: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["model", "inspect", str(model), "--json", "--memory-gib", "0.25"], {}) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


@pytest.mark.parametrize("name", FAMILIES)
def test_folder_and_gguf_file(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, tensors = saved(name, tmp_path / "saved")
    folder, vocabulary = tmp_path / "saved", FAMILIES[name][2]
    for file, content in Tokenizer.fake(len(vocabulary.tokens)).files.items():
        (folder / file).write_bytes(content)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    report = inspected(folder, capsys)

    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    per_token = layers * 2 * config["num_key_value_heads"] * head_dim
    assert report["architecture"] == config["architectures"][0]
    assert report["num_parameters"] == sum(values.size for values in tensors.values())
    assert (report["dtype"], report["tensor_types"]) == ("F32", {"F32": len(tensors)})
    assert report["num_layers"] == layers
    assert report["num_experts"] == (config.get("num_local_experts") or config.get("num_experts") or 0)
    assert report["kv_bytes_per_token"] == {"bfloat16": 2 * per_token, "float32": 4 * per_token}
    assert report["blocks_in_memory"]["float32"] == (1 << 28) // (4 * per_token * 16)
    assert report["chat_templates"] == {"default": TEMPLATE}
    assert report["special_tokens"]
    kinds = (
        config.get("layer_types") or ["sliding_attention" if config.get("sliding_window") else ""] * layers
    )
    assert report["sliding_layers"] == [
        layer for layer, kind in enumerate(kinds) if kind == "sliding_attention"
    ]
    rope = config["rope_parameters"].get("full_attention", config["rope_parameters"])
    assert report["rope"] == rope["rope_type"]

    write_model(tmp_path / "m.gguf", config, tensors, vocabulary, gguf.GGMLQuantizationType.Q8_0)
    imported = inspected(resolve(tmp_path / "m.gguf", tmp_path / "cache"), capsys)
    assert imported["tensor_types"].keys() == {"Q8_0", "F32"}
    assert imported["dtype"] == "Q8_0"
    assert imported["special_tokens"]
    own = (
        "folder", "dtype", "tensor_types", "weights_bytes", "chat_templates", "has_chat_template",
        "special_tokens", "eos_token_ids", "tokenizer_fingerprint", "tokenizer_vocab_size",
    )  # fmt: skip
    differing = {key for key in report if key not in own and report[key] != imported[key]}
    assert differing == set()
