"""Prompt logprobs of a real forward pass: by chunk, in mixed batches, bit for bit in deterministic mode."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from pdserve.engine.port import Row, SampleSpec, ScoreSpec
from pdserve.engine.torch_runner import TorchRunner
from pdserve.errors import RowFailed
from pdserve.sampling import TokenLogprobs
from tests.unit.engine_torch.driving import make_runner, sample_key
from tests.unit.engine_torch.random_model import SMALL, write_random_model

PROMPT = [random.Random(4).randrange(SMALL["vocab_size"]) for _ in range(75)]
TABLE = [9, 3, 7, 1, 5, 2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("model"), dtype=torch.bfloat16)


@pytest.fixture(scope="module", params=[False, True], ids=["", "deterministic"])
def runner(folder: Path, request: pytest.FixtureRequest) -> TorchRunner:
    return make_runner(folder, deterministic=request.param)


def chunk_row(start: int, end: int, top: int, table: list[int] = TABLE) -> Row:
    """Positions start … end − 1 of the prompt, scoring what stands behind each."""
    last = end == len(PROMPT)
    score = ScoreSpec(PROMPT[start + 1 : end + 1], 0, top)
    sample = SampleSpec(sample_key(), PROMPT, len(PROMPT)) if last else None
    return Row(PROMPT[start:end], start, table, sample, score)


def scored(runner: TorchRunner, chunk: int, top: int, *, company: bool = False) -> list[TokenLogprobs]:
    """Of the whole prompt; company: with a row of single tokens, and one that is scored too, in each step."""
    found: list[TokenLogprobs] = []
    for start in range(0, len(PROMPT), chunk):
        rows = [chunk_row(start, min(start + chunk, len(PROMPT)), top)]
        if company:
            rows.insert(0, Row([5], 0, [20], SampleSpec(sample_key(), [5], 1)))
            rows.append(Row(PROMPT[:9], 0, [21], None, ScoreSpec(PROMPT[3:7], 2, 1)))
        outputs = runner.run(rows)
        assert all(output.error is None for output in outputs)
        if company:
            assert outputs[0].scores == ()
            assert len(outputs[2].scores) == 4
        found += outputs[1 if company else 0].scores
    return found


def wanted(runner: TorchRunner) -> torch.Tensor:
    """Log-softmax behind each position, one token at a time. [positions, vocabulary]"""
    rows = []
    for position, token_id in enumerate(PROMPT):
        spec = SampleSpec(sample_key(), PROMPT[: position + 1], len(PROMPT))
        rows.append(runner.logits([Row([token_id], position, TABLE, spec)])[0].clone())
    return torch.log_softmax(torch.stack(rows).to(torch.float64), dim=-1)


@pytest.mark.parametrize("chunk", [1, 16, 40, 100])
def test_they_are_the_log_softmax_of_each_position(runner: TorchRunner, chunk: int) -> None:
    want = wanted(runner)
    got = scored(runner, chunk, 3)
    assert len(got) == len(PROMPT) - 1
    for position, each in enumerate(got):
        here = want[position]
        assert each.logprob == pytest.approx(float(here[PROMPT[position + 1]]), abs=1e-4)
        assert [value for _, value in each.top] == pytest.approx(
            torch.topk(here, 3).values.tolist(), abs=1e-4
        )
        for token_id, value in each.top:
            assert value == pytest.approx(float(here[token_id]), abs=1e-4)


def test_deterministic_ones_depend_on_nothing_else(folder: Path) -> None:
    runner = make_runner(folder, deterministic=True)
    want = scored(runner, 100, 5)
    for chunk, company in ((100, True), (33, False), (64, True), (7, False), (1, True)):
        assert scored(runner, chunk, 5, company=company) == want


def test_the_row_that_samples_samples_as_ever(runner: TorchRunner) -> None:
    plain = Row(PROMPT, 0, TABLE, SampleSpec(sample_key(), PROMPT, len(PROMPT)))
    (want,) = runner.run([plain])
    (got,) = runner.run([chunk_row(0, len(PROMPT), 2)])
    assert got.token_id == want.token_id
    assert len(got.scores) == len(PROMPT) - 1


def test_a_row_that_fails_has_no_scores(runner: TorchRunner) -> None:
    bad, good = runner.run([chunk_row(0, 20, 1, [9999, 3]), chunk_row(0, 20, 1)])
    assert isinstance(bad.error, RowFailed)
    assert (bad.scores, len(good.scores)) == ((), 20)
