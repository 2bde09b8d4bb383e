"""Any two releases: there is always somebody of each role, pairs fit, one process more than before at most."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from deploy.scaling.upgrade import (
    BOTH,
    DECODE,
    PREFILL,
    ROUTER,
    WORKERS,
    KvKind,
    Release,
    UpgradeStep,
    Verb,
    next_step,
    plan_upgrade,
)

KV = st.builds(
    KvKind,
    model=st.sampled_from(["a", "b"]),
    dtype=st.sampled_from(["bfloat16", "float32"]),
    block_size=st.sampled_from([16, 32]),
)
COUNTS = st.fixed_dictionaries(
    {ROUTER: st.integers(1, 3), DECODE: st.integers(1, 4), PREFILL: st.integers(1, 4), BOTH: st.just(0)}
)
RELEASES = st.builds(
    Release,
    wire=st.sampled_from([(1, 1), (1, 2), (1, 3), (2, 0)]),
    kv=KV,
    processes=st.fixed_dictionaries({role: st.sampled_from(["x", "y"]) for role in (*WORKERS, ROUTER)}),
    counts=COUNTS,
)


@dataclass
class Cluster:
    """What runs, as a supervisor would see it."""

    old: dict[str, int]
    new: dict[str, int] = field(default_factory=dict)
    switched: bool = False

    def do(self, step: UpgradeStep) -> None:
        match step.verb:
            case Verb.START:
                self.new[step.role] = step.count
            case Verb.DRAIN:
                self.old[step.role] = step.count
            case Verb.SWITCH:
                self.switched = True

    def serving(self, before: Release, after: Release) -> list[dict[str, int]]:
        """The groups of processes that clients may use and that work together; any one of them serves."""
        if before.kv.model != after.kv.model or not _agree(before, after):
            return [self.new if self.switched else self.old]
        routers = self.old.get(ROUTER, 0) + self.new.get(ROUTER, 0)
        if before.kv != after.kv:
            return [{**self.old, ROUTER: routers}, {**self.new, ROUTER: routers}]
        return [{role: self.old.get(role, 0) + self.new.get(role, 0) for role in (*WORKERS, ROUTER)}]


def _agree(before: Release, after: Release) -> bool:
    return before.wire[0] == after.wire[0] and abs(before.wire[1] - after.wire[1]) <= 1


def walk(before: Release, after: Release) -> Iterator[tuple[Cluster, UpgradeStep]]:
    """Each state behind a step."""
    cluster = Cluster(dict(before.counts))
    for step in plan_upgrade(before, after):
        cluster.do(step)
        yield cluster, step


@given(RELEASES, RELEASES)
def test_somebody_serves_at_every_moment(before: Release, after: Release) -> None:
    for cluster, step in walk(before, after):
        assert any(
            all(group.get(role, 0) > 0 for role in (ROUTER, PREFILL, DECODE))
            for group in cluster.serving(before, after)
        ), step


@given(RELEASES, RELEASES)
def test_it_ends_where_it_should(before: Release, after: Release) -> None:
    cluster = Cluster(dict(before.counts))
    for cluster, _ in walk(before, after):  # noqa: B007
        pass
    whole = before.kv.model != after.kv.model or not _agree(before, after)
    for role in (ROUTER, PREFILL, DECODE):
        replaced = before.processes[role] != after.processes[role] or whole
        replaced |= before.kv != after.kv and role != ROUTER
        assert cluster.old.get(role, 0) == (0 if replaced else before.counts[role])
        assert cluster.new.get(role, 0) == (after.counts[role] if replaced else 0)


@given(RELEASES, RELEASES)
def test_rolling_takes_one_more_at_most_and_none_less(before: Release, after: Release) -> None:
    if before.kv != after.kv or not _agree(before, after):
        return
    last = -1
    for cluster, step in walk(before, after):
        order = (DECODE, BOTH, PREFILL, ROUTER).index(step.role)
        assert order >= last, "decode before prefill workers, routers last"
        last = order
        both = cluster.old.get(step.role, 0) + cluster.new.get(step.role, 0)
        sizes = before.counts[step.role], after.counts[step.role]
        assert min(sizes) <= both <= max(sizes) + 1


@given(RELEASES, RELEASES)
def test_no_old_worker_goes_before_the_second_pools_are_complete(before: Release, after: Release) -> None:
    if before.kv == after.kv and _agree(before, after):
        return
    for cluster, step in walk(before, after):
        if step.verb is Verb.DRAIN and step.role != ROUTER:
            assert all(cluster.new.get(role, 0) >= after.counts[role] for role in (PREFILL, DECODE))


@given(RELEASES, RELEASES, st.data())
def test_an_upgrade_that_lost_its_thread_finds_it_again(
    before: Release, after: Release, data: st.DataObject
) -> None:
    steps = plan_upgrade(before, after)
    cluster = Cluster(dict(before.counts))
    for _ in range(data.draw(st.integers(0, len(steps)))):
        step = next_step(steps, cluster.old, cluster.new, switched=cluster.switched)
        if step is None:
            break
        cluster.do(step)
    lost: list[str] = [role for role, count in cluster.new.items() if count]
    dead = data.draw(st.sampled_from(["", *lost]))
    if dead:
        cluster.new[dead] -= 1
    for _ in range(len(steps) + 1):
        step = next_step(steps, cluster.old, cluster.new, switched=cluster.switched)
        if step is None:
            break
        cluster.do(step)
    whole = Cluster(dict(before.counts))
    for step in steps:
        whole.do(step)
    assert cluster == whole


@given(RELEASES)
def test_other_numbers_alone_are_no_upgrade(before: Release) -> None:
    assert plan_upgrade(before, before) == ()
