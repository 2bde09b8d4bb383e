"""`deterministic`: a disaggregated cluster says what an aggregated one does, token for token and bit for bit.

Whole clusters on a two-layer random model, over chunk sizes, cache hits, batches, sampling and dtypes; with several
workers of a role, killed workers, and a pool so small that sequences are preempted. Besides the tokens, the digest of
each row of logits is compared: tokens alone would hide most differences.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from pdserve.engine.numerics import Precision, choose_precision
from pdserve.messages import Role
from pdserve.sampling import SamplingParams
from pdserve.tokenizer import Tokenizer
from tests.support.conversations import GREEDY, SEEDED, Script, random_script
from tests.support.kernels import PRODUCTION
from tests.support.serving import AGGREGATED, CELLS, ONE_PAIR, Cell, assert_equal, check, serve
from tests.support.torch_cluster import Answer, Shelf, TorchCluster, play
from tests.unit.engine_torch.random_model import SMALL, WIDE, write_random_model

pytestmark = pytest.mark.timeout(600)  # seconds where nothing else runs

TWO_PAIRS = (*ONE_PAIR, ("p1", Role.PREFILL), ("d1", Role.DECODE))
DTYPES = ("float32", "bfloat16")
SAMPLING = {"greedy": GREEDY, "seeded": SEEDED}
MIXED = Cell(chunk=64, hits=True, batch=16)
IDS = range(3, SMALL["vocab_size"])
RESTART_S = 0.7
# Holds the longest sequence and little more.
SMALL_POOL = 48


class Shelves:
    """Loaded models by what they are loaded with."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._shelves: dict[tuple[str, bool, int, Precision | None], Shelf] = {}

    def shelf(
        self,
        dtype: str,
        *,
        deterministic: bool = True,
        num_threads: int = 1,
        precision: Precision | None = None,
    ) -> Shelf:
        key = (dtype, deterministic, num_threads, precision)
        if key not in self._shelves:
            self._shelves[key] = Shelf(
                self._folder,
                Tokenizer.fake(SMALL["vocab_size"]),
                dtype=dtype,
                deterministic=deterministic,
                num_threads=num_threads,
                precision=precision,
            )
        return self._shelves[key]


@pytest.fixture(scope="module")
def shelves(tmp_path_factory: pytest.TempPathFactory) -> Shelves:
    return Shelves(write_random_model(tmp_path_factory.mktemp("model"), dtype=torch.bfloat16))


@pytest.fixture(scope="module")
def wide_shelves(tmp_path_factory: pytest.TempPathFactory) -> Shelves:
    return Shelves(write_random_model(tmp_path_factory.mktemp("wide"), dtype=torch.bfloat16, **WIDE))


def script(params: SamplingParams, num_first: int = 16, num_second: int = 8, max_tokens: int = 24) -> Script:
    return random_script(num_first, num_second, max_tokens=max_tokens, params=params, ids=IDS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_disaggregated_equals_aggregated(cell: Cell, sampling: str, dtype: str, shelves: Shelves) -> None:
    check(shelves.shelf(dtype), cell, script(SAMPLING[sampling]))


def test_a_hundred_prompts(shelves: Shelves) -> None:
    check(shelves.shelf("bfloat16"), MIXED, script(SEEDED, 64, 36))


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_threads(dtype: str, shelves: Shelves) -> None:
    """Fewer, since threads that wait for each other take long on a busy machine."""
    check(shelves.shelf(dtype, num_threads=2), Cell(chunk=64, hits=True, batch=4), script(SEEDED, 8, 2, 8))


def test_plain_bfloat16(shelves: Shelves) -> None:
    """What a CPU without any of the packed kernels computes."""
    check(shelves.shelf("bfloat16", precision=choose_precision("bfloat16", "plain")), MIXED, script(SEEDED))


@pytest.mark.parametrize("precision", PRODUCTION, ids=lambda each: f"{each.name} {each.linear.value}")
def test_alone_in_company_preempted_by_the_kernels_of_any_cpu(
    precision: Precision, wide_shelves: Shelves
) -> None:
    """Of the packaged model's widths, since kernels choose their way by them."""
    shelf = wide_shelves.shelf(precision.name, precision=precision)
    text = script(SEEDED, 16, 2)
    alone = serve(shelf, Cell(chunk=512, hits=False, batch=1).shape(AGGREGATED), text, 1)
    assert_equal(serve(shelf, MIXED.shape(ONE_PAIR), text, 16), alone)
    preempted = serve(shelf, MIXED.shape(ONE_PAIR, d0=SMALL_POOL), text, 16)
    assert preempted.num_events["sequence.preempted"] >= 1
    assert_equal(preempted, alone)


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_ways_of_serving_agree(dtype: str, shelves: Shelves) -> None:
    """Not only two clusters that cut and batch alike: chunks, hits and batches themselves make no difference."""
    text, shelf = script(SEEDED), shelves.shelf(dtype)
    plain = Cell(chunk=512, hits=False, batch=1)
    want = serve(shelf, plain.shape(ONE_PAIR), text, 1)
    assert_equal(serve(shelf, MIXED.shape(AGGREGATED), text, 16), want)


def test_two_pairs(shelves: Shelves) -> None:
    text, shelf = script(SEEDED), shelves.shelf("bfloat16")
    disaggregated = serve(shelf, MIXED.shape(TWO_PAIRS), text, 16)
    assert_equal(disaggregated, serve(shelf, MIXED.shape(AGGREGATED), text, 16))
    assert {answer.prefill_worker for answer in disaggregated.answers} == {"p0", "p1"}
    assert {answer.decode_worker for answer in disaggregated.answers} == {"d0", "d1"}


@pytest.mark.parametrize("victim", ["d0", "p0"])
def test_replay_after_a_killed_worker(victim: str, shelves: Shelves) -> None:
    """Killed while it serves; its successor begins with an empty cache."""
    text, shelf = script(SEEDED), shelves.shelf("bfloat16")
    at_num_tokens = 16 * 8 if victim == "d0" else 8

    async def talk(cluster: TorchCluster) -> list[Answer]:
        worker, num_tokens = cluster.workers[victim], 0

        def kill(num_new: int) -> None:
            nonlocal num_tokens
            num_tokens += num_new
            if num_tokens - num_new < at_num_tokens <= num_tokens:
                worker.kill()
                asyncio.get_running_loop().call_later(RESTART_S, worker.start)

        cluster.on_tokens = kill
        return await text.play(cluster, 16)

    replayed = play(shelf, MIXED.shape(ONE_PAIR), talk)
    assert replayed.num_conflicts == 0
    assert sum(answer.num_attempts > 1 for answer in replayed.answers) >= 4
    assert_equal(replayed, serve(shelf, MIXED.shape(AGGREGATED), text, 16))


@pytest.mark.parametrize("workers", [AGGREGATED, ONE_PAIR], ids=["aggregated", "disaggregated"])
def test_preemption(workers: tuple[tuple[str, Role], ...], shelves: Shelves) -> None:
    """What was decoded is computed again as a prompt."""
    text, shelf = script(SEEDED), shelves.shelf("bfloat16")
    decoder, _ = workers[-1]
    preempted = serve(shelf, MIXED.shape(workers, **{decoder: SMALL_POOL}), text, 16)
    assert preempted.num_events["sequence.preempted"] >= 2
    assert_equal(preempted, serve(shelf, MIXED.shape(AGGREGATED), text, 16))


def test_it_would_be_noticed(shelves: Shelves) -> None:
    """Without `deterministic` the comparison fails."""
    text, shelf = script(SEEDED), shelves.shelf("float32", deterministic=False)
    disaggregated = play(shelf, MIXED.shape(ONE_PAIR), lambda cluster: text.play(cluster, 16))
    aggregated = play(shelf, MIXED.shape(AGGREGATED), lambda cluster: text.play(cluster, 16))
    with pytest.raises(AssertionError):
        assert_equal(disaggregated, aggregated)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_wide_layers(cell: Cell, sampling: str, dtype: str, wide_shelves: Shelves) -> None:
    check(wide_shelves.shelf(dtype), cell, script(SAMPLING[sampling]))
