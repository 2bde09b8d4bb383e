"""A GGUF file becomes a model folder: config, tensors, tokenizer; what isn't supported is refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers import Tokenizer

from pdserve.errors import Incompatible
from pdserve.modelstore.gguf_import import import_gguf
from pdserve.modelstore.model_facts import read_facts
from pdserve.tokenizer import Tokenizer as ModelTokenizer
from tests.unit.modelstore.building import FFN, HEAD_DIM, HIDDEN, LAYERS, tokens_and_types, write_gguf


def imported(tmp_path: Path, **options: Any) -> Path:
    folder = tmp_path / "folder"
    import_gguf(write_gguf(tmp_path / "m.gguf", **options), folder)
    return folder


def json_of(folder: Path, name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / name).read_text())
    return content


def test_config_has_hugging_face_keys(tmp_path: Path) -> None:
    config = json_of(imported(tmp_path), "config.json")
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]) == (
        HIDDEN,
        FFN,
        LAYERS,
    )
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (
        4,
        2,
        HEAD_DIM,
    )
    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_theta"] == 10_000.0
    assert config["rope_scaling"] is None
    assert config["max_position_embeddings"] == 128
    assert config["vocab_size"] == len(tokens_and_types()[0])
    assert config["tie_word_embeddings"] is True
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, [2])


def test_an_output_tensor_means_untied(tmp_path: Path) -> None:
    folder = imported(tmp_path, tied=False)
    assert json_of(folder, "config.json")["tie_word_embeddings"] is False
    assert "lm_head.weight" in json_of(folder, "tensors.json")["tensors"]


def test_tensor_index_finds_each_tensor_and_says_what_was_permuted(tmp_path: Path) -> None:
    folder = imported(tmp_path, quantization=gguf.GGMLQuantizationType.Q4_1)
    index = json_of(folder, "tensors.json")
    raw = (folder / index["file"]).read_bytes()
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    assert len(index["tensors"]) == len(reader.tensors) == 2 + 9 * LAYERS
    by_name = {tensor.name: tensor for tensor in reader.tensors}
    entry = index["tensors"]["model.layers.1.mlp.down_proj.weight"]
    assert (entry["type"], entry["shape"], entry["transform"]) == ("Q4_1", [HIDDEN, FFN], None)
    assert raw[entry["offset"] :][: entry["nbytes"]] == by_name["blk.1.ffn_down.weight"].data.tobytes()
    norm = index["tensors"]["model.layers.0.post_attention_layernorm.weight"]
    assert raw[norm["offset"] :][: norm["nbytes"]] == by_name["blk.0.ffn_norm.weight"].data.tobytes()
    transforms = {name: entry["transform"] for name, entry in index["tensors"].items() if entry["transform"]}
    assert transforms == {
        f"model.layers.{layer}.self_attn.{part}_proj.weight": f"unpermute_{part}"
        for layer in (0, 1)
        for part in "qk"
    }


def test_weights_are_a_second_name_of_the_file(tmp_path: Path) -> None:
    assert (imported(tmp_path) / "weights.gguf").samefile(tmp_path / "m.gguf")


def test_tokenizer_merges_and_keeps_marked_tokens_whole(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(imported(tmp_path) / "tokenizer.json"))
    tokens, _ = tokens_and_types()
    ids = tokenizer.encode("hello hello<|im_end|>hex<think>").ids
    assert [tokens[token_id] for token_id in ids] == ["hello", "Ġhello", "<|im_end|>", "he", "x", "<think>"]
    assert tokenizer.decode(ids) == "hello hellohex<think>"
    added = {token.content: token.special for token in tokenizer.get_added_tokens_decoder().values()}
    assert added == {"<|endoftext|>": True, "<|im_start|>": True, "<|im_end|>": True, "<think>": False}


@pytest.mark.parametrize(
    ("pre", "add_bos", "wanted"),
    [("smollm", None, []), ("smollm", True, [1]), ("llama-bpe", None, [1]), ("llama-bpe", False, [])],
)
def test_begin_of_text_is_put_where_the_file_says(
    tmp_path: Path, pre: str, add_bos: bool | None, wanted: list[int]
) -> None:
    tokenizer = Tokenizer.from_file(str(imported(tmp_path, pre=pre, add_bos=add_bos) / "tokenizer.json"))
    assert tokenizer.encode("").ids == wanted


def test_without_a_pre_tokenizer_it_is_the_default_one(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(imported(tmp_path, pre=None) / "tokenizer.json"))
    assert [text for text, _ in tokenizer.pre_tokenizer.pre_tokenize_str("a=1234")] == ["a", "=", "123", "4"]


def test_generation_ends_at_the_end_of_a_turn_too(tmp_path: Path) -> None:
    folder = imported(tmp_path, eos=0)
    assert json_of(folder, "generation_config.json") == {"eos_token_id": [0, 2], "bos_token_id": 1}
    assert json_of(folder, "config.json")["eos_token_id"] == [0, 2]


def test_without_a_template_only_the_files_own_end_counts(tmp_path: Path) -> None:
    folder = imported(tmp_path, eos=0, template=None)
    assert json_of(folder, "generation_config.json")["eos_token_id"] == [0]
    assert not (folder / "chat_template.jinja").exists()


def test_generation_ends_at_all_ends_that_the_file_lists(tmp_path: Path) -> None:
    folder = imported(tmp_path, eos=0, eos_ids=[0, 5, 9], template=None)
    assert json_of(folder, "generation_config.json")["eos_token_id"] == [0, 5, 9]
    assert ModelTokenizer.load(folder).eos_token_ids == (0, 5, 9)


def test_a_vocabulary_may_be_longer_than_the_embeddings(tmp_path: Path) -> None:
    folder = imported(tmp_path, num_embeddings=260)
    assert json_of(folder, "config.json")["vocab_size"] == 260
    assert ModelTokenizer.load(folder).encode("hello") == [262]


def test_chat_template_is_kept_byte_for_byte(tmp_path: Path) -> None:
    template = "{% for m in messages %}\r\n{{ m.content }}\n{% endfor %}\n\n"
    folder = imported(tmp_path, template=template)
    assert (folder / "chat_template.jinja").read_bytes() == template.encode()


def llama3_table(factor: float, theta: float, head_dim: int) -> np.ndarray[Any, Any]:
    table = []
    for index in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * index / head_dim)
        if wavelength < 8192 / 4:
            table.append(1.0)
        elif wavelength > 8192:
            table.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / 3
            table.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(table, dtype=np.float32)


def test_llama3_scaling_is_recovered_from_its_table(tmp_path: Path) -> None:
    table = llama3_table(32.0, 500_000.0, HEAD_DIM)
    folder = imported(tmp_path, rope_table=table, numbers={"rope.freq_base": 500_000.0})
    assert json_of(folder, "config.json")["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_linear_scaling(tmp_path: Path) -> None:
    folder = imported(tmp_path, numbers={"rope.scaling.type": "linear", "rope.scaling.factor": 4.0})
    assert json_of(folder, "config.json")["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"architecture": "bert"}, "bert"),
        ({"pre": "deepseek-coder"}, "deepseek-coder"),
        ({"tokenizer": "bert"}, "GGUF tokenizer is not supported.*bert"),
        ({"tokenizer": "t5"}, "GGUF tokenizer is not supported.*t5"),
        ({"quantization": gguf.GGMLQuantizationType.MXFP4}, r"blk\.0\.attn_q\.weight, got=MXFP4"),
        ({"numbers": {"rope.scaling.type": "longrope"}}, "rope scaling is not supported.*longrope"),
        ({"numbers": {"rope.dimension_count": 8}}, "partial rotary"),
        ({"numbers": {"attention.value_length": 8}}, "different sizes"),
        ({"numbers": {"embedding_length": 0}}, "embedding_length"),
        (
            {"numbers": {"feed_forward_length": 100}},
            r"layers\.0\.mlp\.gate_proj.*want=\(100, 64\), got=\(96, 64\)",
        ),
        ({"numbers": {"block_count": 3}}, r"lacks a tensor.*model\.layers\.2\."),
        ({"numbers": {"expert_count": 4, "expert_used_count": 2}}, r"unknown name.*ffn_gate"),
        ({"rope_table": np.linspace(1, 9, HEAD_DIM // 2)}, "rope table"),
        ({"eos": 100_000}, "eos_token_id"),
        ({"eos_ids": [0, 100_000]}, "eos_token_ids, got=100000"),
    ],
)
def test_what_is_not_supported_is_refused_by_name_and_leaves_nothing(
    tmp_path: Path, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(Incompatible, match=named) as refused:
        imported(tmp_path, **options)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "folder").exists()


@pytest.mark.parametrize(
    "content", [b"", b"GGUF", b"not a gguf file at all, but long enough to look at", b"\0" * 4096]
)
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(Incompatible, match=r"m\.gguf"):
        import_gguf(tmp_path / "m.gguf", tmp_path / "folder")


@pytest.mark.parametrize("keep", [0.2, 0.6, 0.999])
def test_a_cut_file_is_refused(tmp_path: Path, keep: float) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(Incompatible, match=r"m\.gguf"):
        import_gguf(path, tmp_path / "folder")


def test_facts(tmp_path: Path) -> None:
    facts = read_facts(imported(tmp_path))
    vocab = len(tokens_and_types()[0])
    per_layer = 2 * HIDDEN + HIDDEN * HIDDEN * 2 + 2 * (HIDDEN // 2) * HIDDEN + 3 * HIDDEN * FFN
    assert facts.num_parameters == vocab * HIDDEN + HIDDEN + LAYERS * per_layer
    assert facts.kv_bytes_per_token == {
        "bfloat16": 2 * 2 * LAYERS * 2 * HEAD_DIM,
        "float32": 2 * 4 * LAYERS * 2 * HEAD_DIM,
    }
    assert facts.num_blocks(1 << 20, 16, "float32") == (1 << 20) // (16 * 512)
    assert facts.tensor_types == {"Q8_0": 7 * LAYERS, "F32": 2 + 2 * LAYERS}
