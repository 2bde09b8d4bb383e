"""Asks, decides, acts: what is unreachable decides nothing, what fails is tried again, each decision is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from deploy.scaling.decide import Decision
from deploy.scaling.loop import ScalingLoop
from deploy.scaling.targets import Counts, Range, ScalingTargets
from pdserve.errors import NoWorker
from pdserve.figures import RouterFigures
from pdserve.messages import Role
from pdserve.service.scaling_config import ScalingConfig
from pdserve.status import ClusterStatus
from tests.support.virtual_clock import VirtualClock
from tests.unit.deploy.scaling.statuses import status, worker

TARGETS = ScalingTargets(
    prefill=Range(1, 3),
    decode=Range(1, 3),
    how=ScalingConfig(grow_after_s=1.0, cool_down_up_s=2.0, cool_down_down_s=4.0),
)
BUSY = worker("prefill-0", waiting=9, queued_tokens=4000, tokens_per_s=1000.0)
IDLE = worker("prefill-0", tokens_per_s=1000.0)
DECODE = worker("decode-0", running=1, step_s=0.05)


class Stage:
    """Routers, actuator and audience in one; a look a second."""

    def __init__(self, targets: ScalingTargets = TARGETS) -> None:
        self.clock = VirtualClock()
        self.counts = Counts(prefill=1, decode=1)
        self.answers: list[ClusterStatus | None] = []
        self.told: list[Decision] = []
        self.scaled: list[Mapping[Role, Sequence[str]]] = []
        self.roles: list[tuple[str, Role]] = []
        self.refuses = False
        self.loop = ScalingLoop(self, self, self, targets, self.clock, self.pause)

    async def ask(self) -> Sequence[ClusterStatus | None]:
        counted = RouterFigures(at_s=self.clock.now_s())
        return [answer and replace(answer, figures=counted) for answer in self.answers]

    async def scale(self, counts: Counts, victims: Mapping[Role, Sequence[str]]) -> None:
        if self.refuses:
            raise NoWorker("no room")
        self.counts = counts
        self.scaled.append(victims)

    async def set_role(self, worker_id: str, role: Role) -> None:
        self.roles.append((worker_id, role))
        moved = 1 if role is Role.PREFILL else -1
        self.counts = Counts(prefill=self.counts.prefill + moved, decode=self.counts.decode - moved)

    async def tell(self, decision: Decision) -> None:
        self.told.append(decision)

    async def pause(self, delay_s: float) -> None:
        self.clock.advance(delay_s)

    async def look(self, seconds: int, *answers: ClusterStatus | None) -> None:
        self.answers = list(answers)
        end_s = self.clock.now_s() + seconds
        await self.loop.run(lambda: self.clock.now_s() >= end_s)


async def test_a_queue_brings_workers_and_its_end_takes_one_after_the_other() -> None:
    stage = Stage()
    with capture_logs() as logs:
        await stage.look(2, status(BUSY, DECODE))
    assert stage.counts == Counts(prefill=3, decode=1)
    assert stage.told[-1].changed
    assert stage.told[-1].change == "prefill 1 → 3: prompts queue 4.00 s of 0.5 s"
    assert stage.told[-1].why.startswith(f"{stage.told[-1].change}; decode 1: ")
    assert [(line["event"], line["prefill"], line["before"]) for line in logs] == [
        ("scaling.decided", 3, "1 prefill + 1 decode")
    ]
    others = (worker("prefill-1", running=1, tokens_per_s=1000.0), worker("prefill-2", tokens_per_s=1000.0))
    await stage.look(5, status(IDLE, *others, DECODE))
    assert stage.counts == Counts(prefill=2, decode=1)
    assert stage.scaled[-1][Role.PREFILL] == ("prefill-2", "prefill-0", "prefill-1")
    await stage.look(30, status(IDLE, others[0], DECODE))
    assert stage.counts == Counts(prefill=1, decode=1)


async def test_nobody_answers_nothing_is_decided() -> None:
    stage = Stage()
    await stage.look(2, status(BUSY, DECODE))
    told = len(stage.told)
    with capture_logs() as logs:
        await stage.look(60, None, None)
    assert (stage.counts, len(stage.told)) == (Counts(prefill=3, decode=1), told)
    assert [line["event"] for line in logs] == ["scaling.blind"]  # once


async def test_one_router_of_two_is_silent_no_worker_goes_but_more_may_come() -> None:
    stage = Stage()
    stage.counts = Counts(prefill=2, decode=1)
    await stage.look(60, status(IDLE, worker("prefill-1", tokens_per_s=1000.0), DECODE), None)
    assert stage.counts == Counts(prefill=2, decode=1)
    await stage.look(3, status(BUSY, worker("prefill-1", tokens_per_s=1000.0), DECODE), None)
    assert stage.counts == Counts(prefill=3, decode=1)


async def test_what_an_actuator_refuses_is_told_and_tried_again_after_the_cool_down() -> None:
    stage = Stage()
    stage.refuses = True
    with capture_logs() as logs:
        await stage.look(7, status(BUSY, DECODE))
    assert stage.counts == Counts(prefill=1, decode=1)
    assert 2 <= sum(line["event"] == "scaling.failed" for line in logs) <= 4
    assert any(decision.change.startswith("could not be done (no room): ") for decision in stage.told)
    stage.refuses = False
    await stage.look(5, status(BUSY, DECODE))
    assert stage.counts == Counts(prefill=3, decode=1)


async def test_an_idle_worker_changes_to_the_pool_that_is_short() -> None:
    stage = Stage()
    stage.counts = Counts(prefill=1, decode=2)
    decode = (worker("decode-0", running=1, step_s=0.01), worker("decode-1"))
    await stage.look(3, status(IDLE, *decode))
    await stage.look(2, status(BUSY, *decode))
    assert stage.roles == [("decode-1", Role.PREFILL)]
    assert stage.counts == Counts(prefill=2, decode=1)
    assert not stage.scaled
    assert "decode 2 → 1: one changes to prefill" in next(each.change for each in stage.told if each.changed)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_the_last_of_a_role_never_leaves(role: Role) -> None:
    stage = Stage()
    full = worker("decode-0", running=40, waiting=40, step_s=9.0)
    await stage.look(60, status(IDLE, full) if role is Role.PREFILL else status(BUSY, worker("decode-0")))
    assert not stage.roles
    assert stage.counts.of(role) == 1


async def test_workers_that_are_still_to_come_are_waited_for() -> None:
    stage = Stage()
    stage.counts = Counts(prefill=2, decode=1)
    await stage.look(60, status(BUSY, DECODE))
    assert stage.counts == Counts(prefill=2, decode=1)
    assert stage.told[-1].why.startswith("prefill 2: prompts queue 4.00 s of 0.5 s; 1 still to come")
    await stage.look(300, status(BUSY, DECODE))  # it doesn't come
    assert stage.counts == Counts(prefill=3, decode=1)


async def test_a_queue_that_waits_for_decode_workers_brings_no_prefill_worker() -> None:
    stage = Stage()
    full = worker("decode-0", running=20, waiting=20, step_s=0.05)
    await stage.look(3, status(IDLE, full, waiting=50, waiting_tokens=50_000))
    assert stage.counts == Counts(prefill=1, decode=3)
    assert "70 wait" in next(each.change for each in stage.told if each.changed)


async def test_one_long_prompt_is_no_queue() -> None:
    stage = Stage()
    long = worker("prefill-0", running=1, queued_tokens=8000, tokens_per_s=1000.0)
    await stage.look(10, status(long, DECODE))
    assert stage.counts == Counts(prefill=1, decode=1)


async def test_a_new_range_is_followed_within_its_bounds() -> None:
    stage = Stage()
    stage.counts = Counts(prefill=3, decode=1)
    workers = [worker(f"prefill-{number}", tokens_per_s=1000.0) for number in range(3)]
    stage.loop.targets = ScalingTargets(prefill=Range(1, 1), decode=Range(2, 2), how=TARGETS.how)
    await stage.look(2, status(*workers, DECODE))
    assert stage.counts == Counts(prefill=1, decode=2)
