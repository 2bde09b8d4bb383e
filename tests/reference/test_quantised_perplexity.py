"""Weights multiplied by bytes, as they are stored, say what the dequantised ones say."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from deploy import demo
from pdserve.engine.native import library
from pdserve.engine.numerics import Precision, choose_precision
from pdserve.engine.port import Row, ScoreSpec
from pdserve.tokenizer import Tokenizer
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
