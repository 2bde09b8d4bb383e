"""Whatever the load of a modelled cluster: numbers stay in their bounds, and settle instead of swinging."""

from __future__ import annotations

import random
from itertools import pairwise

from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from deploy.scaling.targets import SCALED, Range, ScalingTargets
from pdserve.service.scaling_config import ScalingConfig
from tests.support.fluid_cluster import FluidCluster, Work, reversals

RANGES = st.tuples(st.integers(1, 3), st.integers(0, 5)).map(lambda pair: Range(pair[0], pair[0] + pair[1]))
HOW = st.builds(
    ScalingConfig,
    ttft_target_s=st.sampled_from([0.2, 0.5, 2.0]),
    itl_target_s=st.sampled_from([0.03, 0.05, 0.2]),
    cool_down_down_s=st.sampled_from([5.0, 20.0, 60.0]),
    max_step=st.integers(1, 3),
    change_roles=st.booleans(),
)
TARGETS = st.builds(ScalingTargets, prefill=RANGES, decode=RANGES, how=HOW)
WORK = st.builds(
    Work,
    prefill_tokens_per_s=st.sampled_from([500.0, 4000.0]),
    prompt_tokens=st.sampled_from([50, 400, 3000]),
    answer_tokens=st.sampled_from([10, 100, 400]),
    row_step_s=st.sampled_from([0.0, 0.002, 0.01]),
    num_blocks=st.sampled_from([200, 4000]),
    start_s=st.sampled_from([0.5, 5.0, 40.0]),
)
LOAD = st.floats(0.0, 40.0)
# Each example is ten minutes of a cluster; none is worth the hours in which a smaller one might be found.
_few = settings(
    max_examples=25,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)


def check_bounds(cluster: FluidCluster) -> None:
    targets = cluster.targets
    for before, after in pairwise(cluster.trace):
        for role in SCALED:
            assert targets.range_of(role).least <= after.of(role) <= targets.range_of(role).most
            assert -1 <= after.of(role) - before.of(role) <= targets.how.max_step
    for role in SCALED:
        assert len([worker for worker in cluster.workers if worker.role is role]) == cluster.counts.of(role)


def check_settled(cluster: FluidCluster) -> None:
    """Up to what a backlog asks for, down to where it proves too few, up, and down as far as it may: not again."""
    check_bounds(cluster)
    for role in SCALED:
        counts = [each.of(role) for each in cluster.trace]
        assert reversals(counts) <= 3, counts
        has_fallen = False
        for moment, (before, after) in enumerate(pairwise(counts)):
            if after > before and has_fallen:  # it proved too few
                assert min(counts[moment + 1 :]) > before, counts
            has_fallen |= after < before


@_few
@given(TARGETS, WORK, LOAD)
def test_a_constant_load_brings_no_swinging(targets: ScalingTargets, work: Work, load: float) -> None:
    check_settled(FluidCluster(targets, work, lambda now_s: load).run(600))


@_few
@given(TARGETS, WORK, LOAD, st.integers(0, 1 << 32), st.floats(0.0, 1.0))
def test_nor_does_a_noisy_one(
    targets: ScalingTargets, work: Work, load: float, seed: int, noise: float
) -> None:
    drawn = random.Random(seed)
    check_settled(
        FluidCluster(targets, work, lambda now_s: load * max(0.0, 1 + noise * drawn.uniform(-1, 1))).run(600)
    )


@_few
@given(TARGETS, WORK, LOAD)
def test_what_the_most_can_carry_is_carried(targets: ScalingTargets, work: Work, load: float) -> None:
    num_most = targets.decode.most
    running = load * work.answer_tokens * work.base_step_s
    grows = load * work.answer_tokens * work.row_step_s / num_most
    assume(grows < 0.9)
    running /= 1 - grows
    assume(work.base_step_s + work.row_step_s * running / num_most < 0.9 * targets.how.itl_target_s)
    assume(load * work.prompt_tokens < 0.9 * targets.prefill.most * work.prefill_tokens_per_s)
    assert FluidCluster(targets, work, lambda now_s: load).run(600).kept


@_few
@given(TARGETS, WORK, st.lists(LOAD, min_size=1, max_size=12))
def test_any_load_stays_within_the_bounds(targets: ScalingTargets, work: Work, loads: list[float]) -> None:
    check_bounds(
        FluidCluster(targets, work, lambda now_s: loads[int(now_s // 50) % len(loads)]).run(50 * len(loads))
    )


@_few
@given(TARGETS, WORK, LOAD)
def test_nothing_goes_while_nobody_answers(targets: ScalingTargets, work: Work, load: float) -> None:
    cluster = FluidCluster(targets, work, lambda now_s: load).run(120)
    before = cluster.counts
    cluster.answers = False
    cluster.load = lambda now_s: 0.0
    cluster.run(300)
    assert cluster.counts == before
    cluster.answers = True
    cluster.run(int(targets.how.cool_down_up_s) - 1)  # what was idle meanwhile is not known to have been
    assert cluster.counts.prefill >= before.prefill and cluster.counts.decode >= before.decode
