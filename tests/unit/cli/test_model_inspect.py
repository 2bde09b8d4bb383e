"""`pdserve model inspect` on a small GGUF file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdserve.cli.main import main
from pdserve.modelstore import resolve
from pdserve.tokenizer import Tokenizer
from tests.unit.modelstore.building import write_gguf


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(resolve(write_gguf(tmp_path / "m.gguf"), tmp_path / "cache"))


def test_for_people(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "inspect", folder], {}) == 0
    said = capsys.readouterr().out
    assert "LlamaForCausalLM" in said
    assert "Q8_0: 14" in said
    assert "<|im_end|>" in said
    _, template = said.split("\nchat template default:\n")
    assert template.strip() == Tokenizer.load(Path(folder)).chat_templates["default"].strip()


def test_for_programs(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "inspect", folder, "--json", "--memory-gib", "0.5"], {}) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["kv_bytes_per_token"] == {"bfloat16": 256, "float32": 512}
    assert report["blocks_in_memory"]["float32"] == (1 << 29) // (512 * 16)
    assert report["tensor_parallel"] == [1, 2, 4]
    assert report["eos_token_ids"] == [2]
    assert report["has_chat_template"] is True
