"""Weights multiplied by bytes, as they are stored, say what the dequantised ones say."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from deploy import demo
from pdserve.engine.config_reader import load_config
from pdserve.engine.models import MODELS
from pdserve.engine.native import library
from pdserve.engine.numerics import Precision, choose_precision
from pdserve.engine.port import Row, ScoreSpec
from pdserve.engine.weights import Weights
from pdserve.tokenizer import Tokenizer
from tests.support.hf_quantised import FORMATS, Format, quantise
from tests.unit.engine_torch.driving import make_runner

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
STORY = Path(demo.__file__).with_name("story.txt")
NUM_TOKENS, CHUNK, BLOCK = 1024, 256, 16
ALLOWED = 1.01


def perplexity(folder: Path, precision: Precision, ids: list[int]) -> float:
    """Of each token behind those before it."""
    runner = make_runner(folder, precision=precision)
    total = 0.0
    for begin in range(0, len(ids), CHUNK):
        end = min(begin + CHUNK, len(ids))
        score = ScoreSpec(first=0, next_ids=tuple(ids[begin + 1 : end + 1]), top=0)
        (given,) = runner.run([Row(ids[begin:end], begin, range(len(ids) // BLOCK + 1), None, score)])
        assert given.error is None
        total -= sum(each.logprob for each in given.scores)
    return math.exp(total / (len(ids) - 1))


@pytest.mark.parametrize("variant", library.available())
def test_perplexity_is_that_of_the_dequantised_model(smollm2: Path, variant: str) -> None:
    ids = Tokenizer.load(smollm2).encode(STORY.read_text(encoding="utf-8"))[:NUM_TOKENS]
    exact = perplexity(smollm2, choose_precision("float32", kernels="torch"), ids)
    ours = perplexity(smollm2, choose_precision("bfloat16", kernels="native", variant=variant), ids)
    print(f"{variant}: {ours:.3f}, dequantised {exact:.3f}, {ours / exact - 1:+.2%}")
    assert ours < ALLOWED * exact


# 576 columns are four groups of 128 and a half: only GPTQ has such.
FOLDERS = {
    "gptq int4 g128": replace(FORMATS["gptq int4 g32"], group=128),
    "awq int4 g64": replace(FORMATS["awq int4 g32"], group=64),
    "ct w8a16 channel": replace(FORMATS["ct w8a16 g32"], group=0),
}


def rounded_to_nearest(smollm2: Path, folder: Path, form: Format) -> Path:
    """The packaged model as a quantised Hugging Face folder; its head is tied and stays, as embeddings do."""
    folder.mkdir()
    config = json.loads((smollm2 / "config.json").read_text())
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(smollm2 / name, folder)
    weights = Weights(smollm2, load_config(smollm2, MODELS))
    plain = {name: weights.load(name, weights.shape(name)).to(torch.bfloat16) for name in weights.names()}
    save_file({name: tensor.contiguous() for name, tensor in plain.items()}, folder / "model.safetensors")
    assert config["tie_word_embeddings"]
    quantise(folder, form)
    return folder


@pytest.mark.skipif(not library.available(), reason="no compiled kernels here")
@pytest.mark.parametrize("name", FOLDERS)
def test_perplexity_of_quantised_folders(smollm2: Path, name: str, tmp_path: Path) -> None:
    ids = Tokenizer.load(smollm2).encode(STORY.read_text(encoding="utf-8"))[:NUM_TOKENS]
    folder = rounded_to_nearest(smollm2, tmp_path / "model", FOLDERS[name])
    exact = perplexity(folder, choose_precision("float32", kernels="torch"), ids)
    for variant in library.available():
        ours = perplexity(folder, choose_precision("bfloat16", kernels="native", variant=variant), ids)
        print(f"{name}, {variant}: {ours:.3f}, dequantised {exact:.3f}, {ours / exact - 1:+.2%}")
        assert ours < ALLOWED * exact
