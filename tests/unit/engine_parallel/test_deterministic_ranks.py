"""Deterministic mode with several ranks: a sequence's logits are its own, whoever shares its steps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pdserve.engine.parallel.gloo_team import GlooTeam, OrderedGlooTeam
from pdserve.engine.port import Row, RowOutput, SampleSpec
from pdserve.sampling import SamplingParams
from tests.support.thread_team import GlooRanks, ThreadRanks, thread_ranks, together
from tests.unit.engine_parallel.test_ranks_as_one import GQA, NUM_BLOCKS, PROMPTS, TABLES
from tests.unit.engine_torch.driving import make_runner, sample_key
from tests.unit.engine_torch.random_model import write_random_model

TOLD = SamplingParams(temperature=0, logprobs=8)


def scores(parallel: ThreadRanks, cuts: Sequence[int], *, in_company: bool) -> list[RowOutput]:
    """What a request gets: its prompt cut so, then three tokens, with or without others in each step."""
    ids, key = list(PROMPTS[0]), sample_key(TOLD)
    others = [Row(PROMPTS[1], 0, TABLES[1], None), Row(PROMPTS[2], 0, TABLES[2], None)] if in_company else []
    given: list[RowOutput] = []
    begin = 0
    for end in [*cuts, len(ids), *range(len(ids) + 1, len(ids) + 4)]:
        spec = SampleSpec(key, tuple(ids), len(PROMPTS[0])) if end == len(ids) else None
        output = parallel.runner.run([*others, Row(ids[begin:end], begin, TABLES[0], spec)])[-1]
        begin = end
        if spec is not None:
            assert output.token_id is not None
            ids.append(output.token_id)
            given.append(output)
    return given


def assert_own(parallel: ThreadRanks) -> None:
    want = scores(parallel, [], in_company=False)
    assert scores(parallel, [16, 20], in_company=True) == want
    assert scores(parallel, [1, 36], in_company=True) == want
    parallel.close()


def test_company_and_cuts_change_no_bit(tmp_path: Path) -> None:
    folder = write_random_model(tmp_path, **GQA)
    parallel = thread_ranks(folder, 2, num_blocks=NUM_BLOCKS, deterministic=True)
    one = make_runner(folder, num_blocks=NUM_BLOCKS, deterministic=True).card.numerics
    numerics = parallel.runner.card.numerics
    assert parallel.runner.card.deterministic and numerics.endswith("/tp2") and numerics != f"{one}/tp2"
    assert_own(parallel)


@pytest.mark.slow
def test_four_ranks_over_gloo(tmp_path: Path) -> None:
    folder = write_random_model(tmp_path, **GQA)
    teams = GlooRanks(4, OrderedGlooTeam).teams
    assert_own(thread_ranks(folder, 4, teams, num_blocks=NUM_BLOCKS, deterministic=True))


def sums(teams: Sequence[GlooTeam], given: Sequence[Tensor]) -> list[Tensor]:
    return together([partial(team.add_up, x.clone()) for team, x in zip(teams, given, strict=True)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_depends_on_no_other_row(dtype: torch.dtype) -> None:
    """Numbers of which any order gives another sum, in rows that move."""
    teams = GlooRanks(4, OrderedGlooTeam).teams
    generator = torch.Generator().manual_seed(3)
    given = [
        (torch.randn(37, 24, generator=generator) * 10.0 ** (2 * rank - 3)).to(dtype) for rank in range(4)
    ]
    whole = sums(teams, given)
    assert all(torch.equal(each, whole[0]) for each in whole)
    for begin in (0, 1, 5, 36):
        part = sums(teams, [each[begin:].contiguous() for each in given])
        assert torch.equal(part[0], whole[0][begin:])
    want = sum(each.to(torch.float64) for each in given)
    assert isinstance(want, Tensor)
    torch.testing.assert_close(whole[0].to(torch.float64), want, rtol=1e-2, atol=1e-3)


def test_what_the_others_need_of_the_first() -> None:
    teams = GlooRanks(3, GlooTeam).teams
    assert together([partial(team.most, -float(team.shard.rank)) for team in teams]) == [0.0] * 3
    given = [torch.tensor([team.shard.rank + 7, 1]) for team in teams]
    tokens = together([partial(team.from_first, x) for team, x in zip(teams, given, strict=True)])
    assert [each.tolist() for each in tokens] == [[7, 1]] * 3
