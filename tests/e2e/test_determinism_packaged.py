"""`deterministic` on the packaged model: real prompts, all its layers, disaggregated as aggregated, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.sampling import SamplingParams
from pdserve.tokenizer import Tokenizer
from tests.reference.prompts import TEXTS
from tests.support.conversations import GREEDY, SEEDED, Script
from tests.support.serving import CELLS, Cell, check
from tests.support.torch_cluster import Shelf

pytestmark = pytest.mark.timeout(600)

SYSTEM = (
    "You answer the questions of visitors of a small museum of clocks. Be kind and short. The museum is open from "
    "ten to five, closed on Mondays; children pay half; the tower clock of 1714 is shown at noon, and the workshop, "
    "where an old planetarium is being repaired, only on the first Sunday of each month. You never talk about money "
    "that was spent for it, and you answer in the language in which you are asked."
)
QUESTIONS = (
    "When do you open?",
    "今天开门吗?",
    "Wie alt ist die Turmuhr?",
    "¿Y los niños?",
    "🕰️?",
    "def noon():",
)
FOLLOW_UPS = ("\n\nAnd", " because", "\n", " — 你好", " 1.", "<|im_end|>\n", " def f(x):", " Why?")


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.load(smollm2)


@pytest.fixture(scope="module")
def shelves(smollm2: Path, tokenizer: Tokenizer) -> dict[str, Shelf]:
    return {dtype: Shelf(smollm2, tokenizer, dtype=dtype) for dtype in ("float32", "bfloat16")}


def script(
    tokenizer: Tokenizer, params: SamplingParams, num_first: int, num_second: int, max_tokens: int
) -> Script:
    """First a prompt longer than the largest chunk, then questions behind one system prompt, then plain texts."""
    asked = [[{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}] for text in QUESTIONS]
    prompts = [
        tokenizer.encode(SYSTEM * 6),
        *(tokenizer.encode_chat(chat) for chat in asked),
        *(tokenizer.encode(text) for text in TEXTS.values()),
    ]
    return Script(
        first=[tuple(ids) for ids in prompts[:num_first]],
        follow_ups=[tuple(tokenizer.encode(text)) for text in FOLLOW_UPS[:num_second]],
        max_tokens=max_tokens,
        params=params,
    )


def test_disaggregated_equals_aggregated(tokenizer: Tokenizer, shelves: dict[str, Shelf]) -> None:
    text = script(tokenizer, SEEDED, 16, 4, 32)
    assert text.num_prompts == 20
    check(shelves["bfloat16"], Cell(chunk=64, hits=True, batch=16), text)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_all_ways_of_serving(
    cell: Cell, params: SamplingParams, dtype: str, tokenizer: Tokenizer, shelves: dict[str, Shelf]
) -> None:
    text = script(tokenizer, params, 3, 1, 8) if cell.batch == 1 else script(tokenizer, params, 16, 2, 8)
    check(shelves[dtype], cell, text)
