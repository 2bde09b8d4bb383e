"""What is wrong with a model's files is one line with its name: by `pdserve model inspect`, before any worker loads."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from pdserve.cli.main import main
from pdserve.errors import Incompatible
from pdserve.modelstore.model_facts import read_facts
from pdserve.modelstore.stored_tensors import SAFETENSORS_INDEX
from pdserve.tokenizer import Tokenizer
from tests.support.processes import run_cli

# Root reads what nobody may read, unless it has given that up.
AS_ANYBODY = () if os.geteuid() else ("setpriv", "--bounding-set=-dac_override,-dac_read_search")
HIDDEN, FFN, VOCAB = 16, 24, 300
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def tensors() -> dict[str, np.ndarray[Any, Any]]:
    layer = {
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
        **{f"self_attn.{part}_proj": (HIDDEN, HIDDEN) for part in "qkvo"},
        "mlp.gate_proj": (FFN, HIDDEN),
        "mlp.up_proj": (FFN, HIDDEN),
        "mlp.down_proj": (HIDDEN, FFN),
    }
    shapes = {f"model.layers.0.{name}": shape for name, shape in layer.items()}
    shapes.update({"model.embed_tokens": (VOCAB, HIDDEN), "model.norm": (HIDDEN,)})
    return {f"{name}.weight": np.zeros(shape, dtype=np.float32) for name, shape in shapes.items()}


def write_folder(folder: Path, *, sharded: bool = False) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for name, content in Tokenizer.fake(VOCAB).files.items():
        (folder / name).write_bytes(content)
    if not sharded:
        save_file(tensors(), folder / "model.safetensors")
        return folder
    weight_map = {name: SHARDS["layers" in name] for name in tensors()}
    for shard in SHARDS:
        save_file(
            {name: values for name, values in tensors().items() if weight_map[name] == shard}, folder / shard
        )
    (folder / SAFETENSORS_INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


def change(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def inspected(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that the command says; it must have failed."""
    assert main(["model", "inspect", str(folder)], {}) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    return said.err


@pytest.mark.parametrize("sharded", [False, True])
def test_whole_folders_are_read(tmp_path: Path, sharded: bool) -> None:
    facts = read_facts(write_folder(tmp_path / "m", sharded=sharded))
    assert facts.num_parameters == sum(values.size for values in tensors().values())
    assert (facts.dtype, facts.tensor_types, facts.tied_embeddings) == ("F32", {"F32": 11}, True)


def test_a_shard_cut_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_folder(tmp_path / "m", sharded=True)
    shard = folder / SHARDS[1]
    shard.write_bytes(shard.read_bytes()[:-1])
    assert f"truncated (file={SHARDS[1]}, tensor=model.layers.0." in inspected(folder, capsys)
    shard.write_bytes(b"\x10")
    assert f"not a safetensors file, or a truncated one (file={SHARDS[1]}" in inspected(folder, capsys)
    shard.unlink()
    assert f"lacks a weights file (file={SHARDS[1]}" in inspected(folder, capsys)


def test_a_tensor_that_the_index_promises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_folder(tmp_path / "m", sharded=True)
    change(folder / SAFETENSORS_INDEX, lambda index: index["weight_map"].update({"model.x": SHARDS[0]}))
    assert f"index promises (tensor=model.x, file={SHARDS[0]}" in inspected(folder, capsys)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        ({"hidden_size": 32}, "shape is not what the config says (tensor=model.embed_tokens.weight"),
        ({"intermediate_size": 25}, "tensor=model.layers.0.mlp.gate_proj.weight"),
        ({"num_hidden_layers": 2}, "lacks a tensor (tensor=model.layers.1.input_layernorm.weight"),
        ({"tie_word_embeddings": False}, "lacks a tensor (tensor=lm_head.weight"),
        ({"attention_bias": True}, "lacks a tensor (tensor=model.layers.0.self_attn.q_proj.bias"),
        ({"vocab_size": None}, "key=vocab_size"),
        ({"num_hidden_layers": "one"}, "key=num_hidden_layers, got=one"),
        ({"quantization_config": {"quant_method": "gptq"}}, "not supported (key=bits, got=None"),
        ({"num_key_value_heads": True}, "key=num_key_value_heads, got=True"),
        ({"sliding_window": "wide"}, "key=sliding_window, got=wide"),
        ({"num_experts": [8]}, "key=num_experts, got=[8]"),
        ({"text_config": None}, "key=text_config, got=None"),
        ({"architectures": []}, "config.json names no architectures"),
        ({"architectures": "LlamaForCausalLM"}, "config.json names no architectures"),
        ({"architectures": [["LlamaForCausalLM"]]}, "config.json names no architectures"),
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "architecture=GPT2LMHeadModel, supported=LlamaForCausalLM, ",
        ),
        ({"hidden_act": "relu"}, "not supported (key=hidden_act, value=relu"),
        ({"rope_scaling": {"rope_type": "su", "factor": 2.0}}, "value=su"),
        ({"rms_norm_eps": "small"}, "key=rms_norm_eps, value=small"),
    ],
)
def test_a_config_that_does_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], edit: dict[str, Any], said: str
) -> None:
    folder = write_folder(tmp_path / "m")
    change(folder / "config.json", lambda config: config.update(edit))
    assert said in inspected(folder, capsys)


def test_a_type_that_no_engine_decodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_folder(tmp_path / "m")
    save_file(
        {**tensors(), "model.norm.weight": np.zeros(HIDDEN, dtype=np.int8)}, folder / "model.safetensors"
    )
    assert "not supported (tensor=model.norm.weight, file=model.safetensors, got=I8" in inspected(
        folder, capsys
    )


@pytest.mark.parametrize("header", [b"[]", b'{"a": 1}', b'{"a": {"dtype": "F32"}}', b"\xff\xff\xff"])
def test_a_broken_header(tmp_path: Path, capsys: pytest.CaptureFixture[str], header: bytes) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert "header is broken (file=model.safetensors" in inspected(folder, capsys)


@pytest.mark.parametrize(
    "index", [{}, {"tensors": 3}, {"tensors": {"a": 3}}, {"tensors": {"a": {"type": "F32", "shape": ["x"]}}}]
)
def test_a_broken_index_of_a_gguf_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], index: dict[str, Any]
) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "tensors.json").write_text(json.dumps({"file": "model.safetensors", **index}))
    assert "tensors.json is broken" in inspected(folder, capsys)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", "{"),
        ("config.json", "[]"),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "{"),
        ("tokenizer_config.json", "[]"),
        ("generation_config.json", "{"),
        ("generation_config.json", "[]"),
        ("model.safetensors.index.json", "{}"),
        ("model.safetensors.index.json", '{"weight_map": []}'),
        ("tensors.json", "{}"),
    ],
)
def test_a_broken_file_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, content: str
) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / file).write_text(content)
    said = inspected(folder, capsys)
    assert file in said
    assert "unexpected" not in said


def test_an_end_of_text_that_is_no_id(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "generation_config.json").write_text('{"eos_token_id": ["</s>"]}')
    assert "key=eos_token_id, value=['</s>']" in inspected(folder, capsys)


def test_ends_of_text_outside_the_vocabulary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, VOCAB]}))
    ends = Tokenizer.load(folder).eos_token_ids
    assert 2 in ends and VOCAB not in ends
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [VOCAB, VOCAB + 1]}))
    (folder / "tokenizer_config.json").unlink()
    said = inspected(folder, capsys)
    assert f"outside the model's vocabulary (eos_token_id={VOCAB + 1}, vocab_size={VOCAB}" in said


def test_a_cluster_of_it_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_folder(tmp_path / "m", sharded=True)
    shard = folder / SHARDS[1]
    shard.write_bytes(shard.read_bytes()[:-1])
    assert main(["up", "--model", str(folder)], {}) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert f"truncated (file={SHARDS[1]}" in said.err


def test_what_only_the_engine_refuses_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_folder(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rope_scaling": {"rope_type": "spiral"}}))
    assert main(["up", "--model", str(folder)], {}) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert "key=rope_scaling.rope_type, value=spiral" in said.err


def test_bytes_that_do_not_fit_a_shape(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    header = json.dumps({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 8)
    with pytest.raises(Incompatible, match=r"don't fit its shape \(tensor=a, .*want=12, got=8"):
        read_facts(folder)


def test_a_tokenizer_may_have_more_tokens_than_the_model(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    for name, content in Tokenizer.fake(VOCAB + 1).files.items():
        (folder / name).write_bytes(content)
    config = json.loads((folder / "tokenizer_config.json").read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "pad_token": "[PAD]"}))
    assert main(["model", "inspect", str(folder)], {}) == 0
    tokenizer = Tokenizer.load(folder)
    assert (tokenizer.highest_token_id, tokenizer.encode("[PAD]")) == (VOCAB + 1, [VOCAB + 1])
    assert tokenizer.eos_token_ids == (256,)


def test_a_config_with_its_text_part_apart_keeps_the_class_of_the_whole(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    text = {key: value for key, value in CONFIG.items() if key != "architectures"}
    (folder / "config.json").write_text(json.dumps({"architectures": ["SeesAndReads"], "text_config": text}))
    facts = read_facts(folder)
    assert (facts.architecture, facts.hidden_size) == ("SeesAndReads", HIDDEN)


FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "model.safetensors")


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    """Neither `inspect` nor `up` nor a worker says more than one line, and whoever starts them is told to give up."""
    folder = write_folder(tmp_path / "m")
    (folder / name).chmod(0)
    for line, code in (("model inspect", 1), ("up --model", 2), ("decode --routers 127.0.0.1:1 --model", 2)):
        done = run_cli(*line.split(), str(folder), limit_s=60, prefix=AS_ANYBODY)
        assert (done.returncode, done.stderr) == (code, f"error: {folder / name}: Permission denied\n")


@pytest.mark.parametrize("name", FILES[2:])
def test_a_link_to_nowhere(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """As in a cache of which only a part was copied. A chat without its template would be another text."""
    folder = write_folder(tmp_path / "m")
    (folder / name).unlink()
    (folder / name).symlink_to(tmp_path / "blobs" / name)
    said = inspected(folder, capsys)
    assert str(folder / name) in said and ("No such file" in said or "lacks a file" in said)


def test_a_disk_that_cannot_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer_config.json").symlink_to("/proc/self/mem")  # whose first bytes nobody can read
    assert inspected(folder, capsys) == "error: Input/output error\n"
