"""`deterministic` for every family: windows, head norms, soft caps, parts of heads and experts change nobody's bits.

Not all of it works row by row: how many tokens of a step choose an expert depends on who shares the step.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.tokenizer import Tokenizer
from tests.support.conversations import GREEDY, SEEDED, Script, random_script
from tests.support.random_families import VOCAB_SIZE, save_random
from tests.support.serving import AGGREGATED, ONE_PAIR, Cell, assert_equal, check, serve
from tests.support.torch_cluster import Shelf, play

pytestmark = pytest.mark.timeout(600)  # seconds where nothing else runs

EXPERTS = ("mixtral", "qwen3 moe, some layers dense")
DENSE = ("llama yarn", "mistral", "qwen2 upper windows", "qwen3", "gemma3 capped", "phi4 mini")
NAMES = (*EXPERTS, *DENSE)
DTYPES = ("float32", "bfloat16")
BATCHES = (1, 8)


class Shelves:
    """Loaded models."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._shelves: dict[tuple[str, str, bool], Shelf] = {}

    def shelf(self, name: str, dtype: str, *, deterministic: bool = True) -> Shelf:
        key = (name, dtype, deterministic)
        if key not in self._shelves:
            model = self._folder / name
            if not model.exists():
                save_random(name, model)
            tokenizer = Tokenizer.fake(VOCAB_SIZE)
            self._shelves[key] = Shelf(model, tokenizer, dtype=dtype, deterministic=deterministic)
        return self._shelves[key]


@pytest.fixture(scope="module")
def shelves(tmp_path_factory: pytest.TempPathFactory) -> Shelves:
    return Shelves(tmp_path_factory.mktemp("experts"))


def script(num_first: int = 9, num_second: int = 4) -> Script:
    return random_script(num_first, num_second, max_tokens=12, params=SEEDED, ids=range(3, VOCAB_SIZE))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", EXPERTS)
@pytest.mark.parametrize("batch", BATCHES)
def test_disaggregated_equals_aggregated(batch: int, name: str, dtype: str, shelves: Shelves) -> None:
    check(shelves.shelf(name, dtype), Cell(chunk=64, hits=True, batch=batch), script())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", DENSE)
def test_disaggregated_equals_aggregated_dense(name: str, dtype: str, shelves: Shelves) -> None:
    check(shelves.shelf(name, dtype), Cell(chunk=64, hits=True, batch=8), script())


@pytest.mark.parametrize("name", NAMES)
def test_all_ways_of_serving_agree(name: str, shelves: Shelves) -> None:
    """Chunks, hits and batches themselves make no difference."""
    shelf, alone = shelves.shelf(name, "float32"), Cell(chunk=512, hits=False, batch=1)
    want = serve(shelf, alone.shape(ONE_PAIR), script(), 1)
    assert_equal(serve(shelf, Cell(chunk=64, hits=True, batch=8).shape(AGGREGATED), script(), 8), want)


def test_it_would_be_noticed(shelves: Shelves) -> None:
    """Without `deterministic` the comparison fails."""
    shelf, cell = (
        shelves.shelf(EXPERTS[0], "float32", deterministic=False),
        Cell(chunk=64, hits=True, batch=8),
    )
    records = [
        play(shelf, cell.shape(workers), lambda cluster: script().play(cluster, 8))
        for workers in (ONE_PAIR, AGGREGATED)
    ]
    with pytest.raises(AssertionError):
        assert_equal(*records)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk", [64, 512])
@pytest.mark.parametrize("name", NAMES)
def test_more_prompts(name: str, chunk: int, dtype: str, shelves: Shelves) -> None:
    text = random_script(40, 20, max_tokens=24, params=GREEDY, ids=range(3, VOCAB_SIZE))
    check(shelves.shelf(name, dtype), Cell(chunk=chunk, hits=True, batch=16), text)
