"""A model divided among ranks gives the tokens of the whole one, and leaves the same KV where links look for it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pdserve.engine.native import library
from pdserve.engine.numerics import LinearKind, Precision, choose_precision
from pdserve.engine.port import Row, RowOutput, Runner, SampleSpec, ScoreSpec
from pdserve.modelstore.errors import BadModel
from pdserve.sampling import SamplingParams
from tests.support.hf_quantised import FORMATS, quantise
from tests.support.memories import pool_bytes
from tests.support.random_families import VOCAB_SIZE, save_random
from tests.support.thread_team import ThreadRanks, thread_ranks
from tests.unit.engine_torch.driving import GREEDY, make_runner, sample_key
from tests.unit.engine_torch.random_model import write_random_model

GQA: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 2}
DRAWN = SamplingParams(temperature=0.9, top_k=40, top_p=0.95, repetition_penalty=1.2, logprobs=3)
NUM_BLOCKS = 32
TABLES = ([7, 3, 19, 4], [11, 12, 13, 14], [30, 0, 22, 5])
PROMPTS = tuple(
    [random.Random(seed).randrange(VOCAB_SIZE) for _ in range(length)]
    for seed, length in enumerate((37, 16, 5))
)


@contextmanager
def ranks(folder: Path, size: int, **settings: Any) -> Iterator[ThreadRanks]:
    made = thread_ranks(folder, size, num_blocks=NUM_BLOCKS, **settings)
    np.frombuffer(pool_bytes(made.runner), dtype=np.uint8)[:] = 0xFF  # nothing may read what nobody wrote
    yield made
    made.close()


def whole(folder: Path, **settings: Any) -> Runner:
    return make_runner(folder, num_blocks=NUM_BLOCKS, **settings)


def told(runner: Runner) -> list[RowOutput]:
    """Three requests, in chunks and together: one greedy, one drawn, one that asks how likely its prompt is."""
    ids = [list(prompt) for prompt in PROMPTS]
    keys = [sample_key(GREEDY), sample_key(DRAWN), sample_key(GREEDY)]

    def row(index: int, begin: int, end: int) -> Row:
        known = ids[index]
        is_last = end == len(known)
        score = None
        if index == 2 and begin == 0:
            score = ScoreSpec(known[1:end], 0, 2)
        spec = SampleSpec(keys[index], tuple(known), len(PROMPTS[index])) if is_last else None
        return Row(known[begin:end], begin, TABLES[index], spec, score)

    outputs = runner.run([row(0, 0, 20)])  # nothing is sampled
    for step in (
        [row(0, 20, 33), row(1, 0, 16)],
        [row(0, 33, 37), row(2, 0, 5)],
    ):
        outputs += runner.run(step)
    for index, output in ((0, outputs[3]), (1, outputs[2]), (2, outputs[4])):
        assert output.token_id is not None
        ids[index].append(output.token_id)
    for _ in range(12):
        given = runner.run([row(index, len(ids[index]) - 1, len(ids[index])) for index in range(3)])
        for known, output in zip(ids, given, strict=True):
            assert output.token_id is not None, output.error
            known.append(output.token_id)
        outputs += given
    return outputs


def assert_same(got: list[RowOutput], want: list[RowOutput], tolerance: float = 2e-4) -> None:
    assert [each.token_id for each in got] == [each.token_id for each in want]
    for here, there in zip(got, want, strict=True):
        for one, other in zip((here.logprobs, *here.scores), (there.logprobs, *there.scores), strict=True):
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                assert one.logprob == pytest.approx(other.logprob, abs=tolerance)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_give_the_tokens_of_one(tmp_path: Path, size: int) -> None:
    """2 KV heads: of 4 ranks, 2 write the same one."""
    folder = write_random_model(tmp_path, attention_bias=True, mlp_bias=True, **GQA)
    with ranks(folder, size) as parallel:
        assert_same(told(parallel.runner), told(whole(folder)))


@pytest.mark.parametrize("form", ["ct w4a16 g32", "gptq int4 g32 act order", "fp8 blocks"])
def test_quantised_folders_are_divided(tmp_path: Path, form: str) -> None:
    """Columns by whole units, by parts of them, and of a decoded matrix."""
    folder = write_random_model(tmp_path, hidden_size=128, intermediate_size=192, **GQA)
    quantise(folder, FORMATS[form])
    with ranks(folder, 2) as parallel:
        assert_same(told(parallel.runner), told(whole(folder)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["qwen2", "qwen3 with biases", "mistral", "gemma3 capped", "phi3", "phi4 mini", "mixtral"],
)
def test_two_ranks_of_every_family(tmp_path: Path, name: str) -> None:
    folder = save_random(name, tmp_path)
    with ranks(folder, 2) as parallel:
        assert_same(told(parallel.runner), told(whole(folder)))


@pytest.mark.slow
@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.parametrize("name", ["gemma3", "qwen3 with biases", "qwen3 moe, weights as they are"])
def test_families_whose_heads_are_shared(tmp_path: Path, size: int, name: str) -> None:
    folder = save_random(name, tmp_path, **GQA)
    with ranks(folder, size) as parallel:
        assert_same(told(parallel.runner), told(whole(folder)))


def test_the_shared_pool_holds_what_one_rank_would_write(tmp_path: Path) -> None:
    folder = write_random_model(tmp_path, **GQA)
    single = whole(folder)
    want_outputs = told(single)
    want = torch.frombuffer(pool_bytes(single), dtype=torch.float32).view(NUM_BLOCKS, -1)
    for size in (2, 4):
        with ranks(folder, size) as parallel:
            assert_same(told(parallel.runner), want_outputs)
            assert parallel.runner.layout == single.layout
            got = torch.frombuffer(pool_bytes(parallel.runner), dtype=torch.float32).view(NUM_BLOCKS, -1)
            used = TABLES[0] + TABLES[1][:2] + TABLES[2][:2]
            torch.testing.assert_close(got[used], want[used], atol=1e-4, rtol=1e-4)
            unused = [block for block in range(NUM_BLOCKS) if not any(block in each for each in TABLES)]
            assert bool(torch.isnan(got[unused]).all())


def test_ranks_that_share_a_head_compute_the_same_bits(tmp_path: Path) -> None:
    """Both write to the same place, at the same time."""
    folder = write_random_model(tmp_path, **GQA)
    with ranks(folder, 4) as parallel:
        pools = [rank.whole_layout for rank in parallel.ranks]
        assert len(set(pools)) == 1
        for rank in parallel.ranks:  # from here on, each writes to memory of its own
            rank._pool = type(rank._pool)(rank.layout, torch.float32)
        parallel.runner.run([Row(PROMPTS[0], 0, TABLES[0], None)])
        parallel.close()
        for one, other in ((0, 1), (2, 3)):
            first, second = (parallel.ranks[rank]._pool.tensor for rank in (one, other))
            assert torch.equal(first.view(torch.int32), second.view(torch.int32))
            assert bool(first.any())


@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_sixteen_bits_too(tmp_path: Path, kernels: str) -> None:
    """Rounded sums differ, so that logits do; the first tokens of a text don't."""
    if kernels == "native" and not library.available():
        pytest.skip(f"compiled kernels {library.why_none()}")
    folder = write_random_model(tmp_path, dtype=torch.bfloat16, **GQA)
    precision = Precision("bfloat16", torch.float32, torch.bfloat16, LinearKind.FBGEMM_HALF)
    if kernels == "native":
        precision = choose_precision("bfloat16", kernels="native")
    with ranks(folder, 4, precision=precision) as parallel:
        got, want = told(parallel.runner)[:3], told(whole(folder, precision=precision))[:3]
        assert_same(got, want, tolerance=0.1)


def test_each_rank_keeps_what_it_has_made_for_a_step(tmp_path: Path) -> None:
    """A decode step behind another one costs no new tables, though those of a part are others than the engine's."""
    if not library.available():
        pytest.skip(f"compiled kernels {library.why_none()}")
    folder = write_random_model(tmp_path, dtype=torch.bfloat16, head_dim=16, **GQA)
    precision = choose_precision("bfloat16", kernels="native")

    def steps(*, same_table: bool) -> tuple[list[int], list[int]]:
        """The tokens, and how many attentions each rank has made for all decode steps."""
        table, ids = [7, 3], list(PROMPTS[0][:25])
        with ranks(folder, 4, precision=precision) as parallel:
            made: list[set[int]] = [set() for _ in parallel.ranks]
            parallel.runner.run([Row(ids[:-1], 0, table, None)])
            for _ in range(20):
                if len(ids) == 33:  # into another block
                    table.append(19)
                spec = SampleSpec(sample_key(), tuple(ids), 25)
                row = Row(ids[-1:], len(ids) - 1, table if same_table else list(table), spec)
                token_id = parallel.runner.run([row])[0].token_id
                assert token_id is not None
                ids.append(token_id)
                parallel.wait()
                for seen, rank in zip(made, parallel.ranks, strict=True):
                    assert rank._native is not None and rank._native._last is not None
                    kept.append(rank._native._last)  # alive: no other one gets its id
                    seen.add(id(rank._native._last))
        return ids, [len(seen) for seen in made]

    kept: list[object] = []
    ids, made = steps(same_table=True)
    assert made == [1] * 4
    assert steps(same_table=False) == (ids, [20] * 4)


def test_a_row_that_fits_nowhere_fails_alone(tmp_path: Path) -> None:
    folder = write_random_model(tmp_path)
    with ranks(folder, 2) as parallel:
        good = Row(PROMPTS[0], 0, TABLES[0], SampleSpec(sample_key(), PROMPTS[0], len(PROMPTS[0])))
        bad = Row([1, 2], 0, [NUM_BLOCKS], None)
        outputs = parallel.runner.run([bad, good])
        assert outputs[0].error is not None and outputs[0].error.fields["num_blocks"] == NUM_BLOCKS
        assert outputs[1].token_id == whole(folder).run([good])[0].token_id
        assert parallel.runner.run([bad])[0].error is not None  # and no rank waits for another


def test_two_sums_a_layer(tmp_path: Path) -> None:
    folder = write_random_model(tmp_path, num_hidden_layers=3)
    with ranks(folder, 2) as parallel:
        parallel.runner.run([Row(PROMPTS[0], 0, TABLES[0], None)])
        assert parallel.meeting.num_sums == 2 * 3


def test_what_others_are_told_of_it(tmp_path: Path) -> None:
    folder = write_random_model(tmp_path)
    with ranks(folder, 2) as parallel:
        card, single = parallel.runner.card, whole(folder).card
        assert card.numerics == f"{single.numerics}/tp2"
        assert (card.weights_fingerprint, card.cache_seed) == (single.weights_fingerprint, single.cache_seed)
        assert not card.step_errors_are_sound


@pytest.mark.parametrize(
    ("size", "changes", "field"),
    [
        (4, {}, "num_heads"),
        (3, {"num_key_value_heads": 2, "intermediate_size": 96}, "num_kv_heads"),
        (2, {"intermediate_size": 162}, "width"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    tmp_path: Path, size: int, changes: dict[str, Any], field: str
) -> None:
    folder = write_random_model(tmp_path, **changes)
    with pytest.raises(BadModel, match="can't be divided among so many ranks") as refused:
        thread_ranks(folder, size)
    assert refused.value.fields["tensor_parallel"] == size and field in refused.value.fields
