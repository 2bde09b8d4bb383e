"""Any look after any history: within bounds, never the last of a role, more load never means fewer workers."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st

from deploy.scaling.decide import History, decide
from deploy.scaling.demand import Known
from deploy.scaling.observe import Observed, WorkerSeen
from deploy.scaling.pool import PoolHistory
from deploy.scaling.targets import SCALED, Counts, Range, ScalingTargets
from pdserve.messages import Role
from pdserve.service.scaling_config import ScalingConfig

NOW_S = 1000.0
PAST = st.one_of(st.none(), st.floats(0.0, NOW_S))
WORKERS = st.lists(
    st.builds(
        WorkerSeen,
        id=st.just(""),
        role=st.sampled_from(SCALED),
        state=st.sampled_from(["up", "up", "up", "hung", "draining"]),
        told=st.sampled_from([True, True, True, False]),
        num_running=st.sampled_from([0, 0, 1, 20]),
        num_waiting=st.sampled_from([0, 0, 0, 9]),
        num_queued_tokens=st.sampled_from([0, 0, 100, 20_000]),
        tokens_per_s=st.sampled_from([0.0, 500.0, 4000.0]),
        occupancy=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
        step_s=st.sampled_from([0.0, 0.02, 0.09, 3.0]),
        slowest_step_s=st.just(0.0),
    ),
    min_size=2,
    max_size=8,
).map(lambda found: tuple(replace(worker, id=f"{worker.role.value}-{n}") for n, worker in enumerate(found)))
LOOKS = st.builds(
    Observed,
    at_s=st.just(NOW_S),
    complete=st.booleans(),
    workers=WORKERS,
    num_waiting=st.sampled_from([0, 0, 0, 50]),
    num_waiting_tokens=st.sampled_from([0, 0, 0, 50_000]),
    prompt_tokens_per_s=st.sampled_from([None, 0.0, 100.0, 20_000.0]),
    queue_s=st.sampled_from([None, 0.0, 0.1, 100.0, float("inf")]),
)
PATIENT = PoolHistory(over_since_s=0.0, calm_since_s=0.0, settled_s=0.0, changed_s=0.0, shrunk_s=0.0)
POOLS = st.just(PATIENT) | st.builds(
    PoolHistory,
    over_since_s=PAST,
    calm_since_s=PAST,
    starting_since_s=PAST,
    settled_s=st.floats(0.0, NOW_S),
    changed_s=st.floats(0.0, NOW_S),
    shrunk_s=st.floats(0.0, NOW_S),
    too_few=st.integers(0, 4),
    guarded_s=st.floats(0.0, 2000.0),
    guarded_until_s=st.floats(0.0, 2 * NOW_S),
)
HISTORIES = st.builds(
    lambda known, prefill, decode: History(
        seen_s=NOW_S - 1, known=known, pools={Role.PREFILL: prefill, Role.DECODE: decode}
    ),
    st.builds(
        Known,
        tokens_per_s=st.sampled_from([0.0, 1000.0]),
        prompt_tokens_per_s=st.sampled_from([None, 0.0, 100.0]),
        least_step_s=st.sampled_from([float("inf"), 0.01]),
    ),
    POOLS,
    POOLS,
)
RANGES = st.tuples(st.integers(1, 4), st.integers(0, 4)).map(lambda pair: Range(pair[0], sum(pair)))
TARGETS = st.builds(
    ScalingTargets,
    prefill=RANGES,
    decode=RANGES,
    how=st.builds(ScalingConfig, max_step=st.integers(1, 3), change_roles=st.booleans()),
)
ASKED = st.builds(Counts, prefill=st.integers(1, 5), decode=st.integers(1, 5))


@given(LOOKS, ASKED, TARGETS, HISTORIES)
def test_a_decision_keeps_its_bounds(
    seen: Observed, asked: Counts, targets: ScalingTargets, history: History
) -> None:
    decision, _ = decide(seen, asked, targets, history)
    for role in SCALED:
        before, after, bounds = asked.of(role), decision.counts.of(role), targets.range_of(role)
        if bounds.least <= before <= bounds.most:
            assert bounds.least <= after <= bounds.most
        assert -1 <= after - before <= targets.how.max_step
        assert after >= 1
    assert decision.changed == (decision.counts != asked)
    assert decision.why


IDLE = st.builds(
    WorkerSeen,
    id=st.just(""),
    role=st.sampled_from(SCALED),
    state=st.sampled_from(["up", "up", "up", "up", "hung"]),
    told=st.sampled_from([True, True, True, True, False]),
    num_running=st.just(0),
    num_waiting=st.just(0),
    num_queued_tokens=st.just(0),
    tokens_per_s=st.just(500.0),
    occupancy=st.just(0.0),
    step_s=st.just(0.0),
    slowest_step_s=st.just(0.0),
)


@given(st.lists(IDLE, min_size=3, max_size=7), st.booleans(), ASKED)
def test_only_what_is_surely_spare_leaves(found: list[WorkerSeen], complete: bool, asked: Counts) -> None:
    """All have been idle for long, as far as is known: what keeps a worker is only what isn't known, and its role."""
    workers = tuple(replace(worker, id=f"{worker.role.value}-{n}") for n, worker in enumerate(found))
    seen = Observed(at_s=NOW_S, complete=complete, workers=workers, prompt_tokens_per_s=0.0)
    targets = ScalingTargets(prefill=Range(1, 9), decode=Range(1, 9), how=ScalingConfig())
    patient = History(
        seen_s=NOW_S - 1, known=Known(prompt_tokens_per_s=0.0), pools=dict.fromkeys(SCALED, PATIENT)
    )
    decision, _ = decide(seen, asked, targets, patient)
    for role in SCALED:
        pool, count = seen.pool(role), asked.of(role)
        surely = complete and pool.num_untold == 0 and pool.num_ready >= max(2, count) and count >= 2
        assert decision.counts.of(role) == (count - 1 if surely else count)


@given(LOOKS, ASKED, TARGETS, HISTORIES)
def test_who_changes_its_role_is_ready_and_counted_in_both_pools(
    seen: Observed, asked: Counts, targets: ScalingTargets, history: History
) -> None:
    decision, _ = decide(seen, asked, targets, history)
    assert len(decision.set_roles) <= (1 if targets.how.change_roles else 0)
    for change in decision.set_roles:
        [worker] = [worker for worker in seen.workers if worker.id == change.worker_id]
        assert worker.ready and worker.told and worker.role is not change.role
        assert decision.counts.of(worker.role) == asked.of(worker.role) - 1
        assert decision.counts.of(change.role) == asked.of(change.role) + 1


@given(LOOKS, ASKED, TARGETS, HISTORIES, st.floats(1.0, 20.0))
def test_a_longer_queue_never_means_fewer_prefill_workers(
    seen: Observed, asked: Counts, targets: ScalingTargets, history: History, times: float
) -> None:
    assume(not seen.pool(Role.DECODE).num_waiting)
    longer = tuple(
        replace(worker, num_queued_tokens=round(worker.num_queued_tokens * times))
        if worker.role is Role.PREFILL
        else worker
        for worker in seen.workers
    )
    more = replace(seen, workers=longer, num_waiting_tokens=round(seen.num_waiting_tokens * times))
    less, _ = decide(seen, asked, targets, history)
    decision, _ = decide(more, asked, targets, history)
    assert decision.counts.prefill >= less.counts.prefill


@given(LOOKS, ASKED, TARGETS, HISTORIES, st.floats(0.0, 1.0), st.floats(1.0, 20.0))
def test_fuller_pools_and_longer_steps_never_mean_fewer_decode_workers(
    seen: Observed, asked: Counts, targets: ScalingTargets, history: History, fuller: float, times: float
) -> None:
    """From a step of which it is known that it isn't the shortest ever seen: that one would be news."""
    fixed = replace(history, known=replace(history.known, least_step_s=0.01))
    loaded = tuple(
        replace(
            worker,
            occupancy=worker.occupancy + (1 - worker.occupancy) * fuller,
            step_s=worker.step_s * times,
        )
        if worker.role is Role.DECODE
        else worker
        for worker in seen.workers
    )
    less, _ = decide(seen, asked, targets, fixed)
    decision, _ = decide(replace(seen, workers=loaded), asked, targets, fixed)
    assert decision.counts.decode >= less.counts.decode
