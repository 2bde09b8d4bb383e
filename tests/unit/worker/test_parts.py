"""Watchdog, metered runner: the small parts of a worker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pdserve.engine.fake_runner import FakeFaults, FakeRunner, InjectedFault
from pdserve.engine.port import LaunchingRunner, Row
from pdserve.worker.messages import EngineBeat, StepBegun
from pdserve.worker.metered_runner import MeteredLaunches, MeteredRunner, metered
from pdserve.worker.watchdog import Watchdog
from tests.support.launching_runner import LateRunner
from tests.support.virtual_clock import VirtualClock


class TestWatchdog:
    def ticks_until_alarm(self, watchdog: Watchdog, limit: int = 1000) -> int | None:
        return next((count for count in range(1, limit) if watchdog.tick() is not None), None)

    def test_work_without_steps_is_a_hang_after_five_seconds(self) -> None:
        watchdog = Watchdog(0.5)
        watchdog.on_beat(EngineBeat(1, True, 0.01))
        assert self.ticks_until_alarm(watchdog) == 11

    def test_a_slow_recent_step_gives_more_time(self) -> None:
        watchdog = Watchdog(0.5)
        watchdog.on_beat(EngineBeat(1, True, 2.0))
        assert self.ticks_until_alarm(watchdog) == 41

    def test_idle_is_no_hang_and_steps_count_anew(self) -> None:
        watchdog = Watchdog(0.5)
        for _ in range(100):
            watchdog.on_beat(EngineBeat(1, False, 0.01))
            assert watchdog.tick() is None
        for step in range(2, 100):
            watchdog.on_beat(EngineBeat(step, True, 0.01))
            assert all(watchdog.tick() is None for _ in range(9))

    def test_an_idle_owner_that_says_nothing_hangs_too(self) -> None:
        watchdog = Watchdog(0.5)
        watchdog.on_beat(EngineBeat(1, False, 0.01))
        assert not watchdog.expects_step
        assert self.ticks_until_alarm(watchdog) == 11
        assert watchdog.expects_step, (
            "routers are told of work in hand, as they can't see what was sent to it"
        )

    def test_a_step_that_never_ends_is_found_though_the_engine_was_idle_before(self) -> None:
        watchdog = Watchdog(0.5)
        watchdog.on_beat(EngineBeat(1, False, 0.01))
        watchdog.on_step_begun(StepBegun(new_shape=False))
        assert self.ticks_until_alarm(watchdog) == 11

    def test_the_first_step_of_a_shape_may_take_long(self) -> None:
        watchdog = Watchdog(0.5)
        watchdog.on_step_begun(StepBegun(new_shape=True))
        assert not watchdog.expects_step
        assert self.ticks_until_alarm(watchdog) is None
        watchdog.on_beat(EngineBeat(1, True, 30.0))
        assert watchdog.limit_s == 300.0 and watchdog.expects_step

    def test_is_busy_only_in_a_step_that_may_last(self) -> None:
        watchdog = Watchdog(0.5)
        assert not watchdog.is_busy_for(0.25)
        watchdog.on_step_begun(StepBegun(new_shape=True))
        assert watchdog.is_busy_for(0.25)
        watchdog.on_beat(EngineBeat(1, True, 0.3))
        assert not watchdog.is_busy_for(0.25)
        watchdog.on_step_begun(StepBegun(new_shape=False))
        assert watchdog.is_busy_for(0.25) and not watchdog.is_busy_for(0.5)


class TestMeteredRunner:
    def test_says_which_steps_are_of_a_new_shape_and_times_them(self) -> None:
        clock, begun = VirtualClock(), list[bool]()
        meter = MeteredRunner(FakeRunner(num_blocks=4), clock, begun.append)
        for num_tokens in (20, 21, 40):
            meter.run([Row([1] * num_tokens, 0, [0, 1, 2], None)])
        assert begun == [True, False, True]
        assert meter.num_steps == 3 and meter.step_s == 0.0

    def test_a_failed_step_counts(self) -> None:
        faults = FakeFaults(failing_steps=frozenset({1}))
        meter = MeteredRunner(FakeRunner(num_blocks=4, faults=faults), VirtualClock(), lambda new: None)
        with pytest.raises(InjectedFault):
            meter.run([Row([1], 0, [0], None)])
        assert meter.num_steps == 1

    def test_rows_share_a_steps_joules_by_their_tokens(self) -> None:
        readings = iter((10.0, 16.0, 16.0, None))
        meter = MeteredRunner(FakeRunner(num_blocks=4), VirtualClock(), lambda new: None, Readings(readings))
        rows = [Row([1] * 20, 0, [0, 1], None), Row([1] * 4, 0, [2], None)]
        assert [output.energy_j for output in meter.run(rows)] == [5.0, 1.0]
        assert [output.energy_j for output in meter.run(rows)] == [None, None]


class TestMeteredLaunches:
    def test_a_step_counts_from_when_the_one_before_it_was_read(self) -> None:
        clock, begun = VirtualClock(), list[bool]()
        inner = LateRunner(FakeRunner(num_blocks=4, block_size=16))
        meter = MeteredLaunches(inner, clock, begun.append, Readings(iter((10.0, 16.0, 20.8, 30.0, 36.0))))
        assert isinstance(metered(inner, clock, begun.append, None), LaunchingRunner)
        waiting = metered(FakeRunner(num_blocks=4), clock, begun.append, None)
        assert not isinstance(waiting, LaunchingRunner)
        rows = [Row([1] * 20, 0, [0, 1], None), Row([1] * 4, 0, [2], None)]
        first = meter.launch(rows)
        clock.advance(0.5)
        second = meter.launch(rows)
        clock.advance(0.5)
        assert [output.energy_j for output in meter.collect(first)] == [5.0, 1.0]
        assert (meter.step_s, meter.num_steps) == (1.0, 1)
        clock.advance(0.25)
        assert [output.energy_j for output in meter.collect(second)] == pytest.approx([4.0, 0.8])
        assert (meter.step_s, meter.num_steps) == (0.25, 2)
        # What a machine takes while nothing runs is no step's.
        assert [output.energy_j for output in meter.collect(meter.launch(rows))] == [5.0, 1.0]
        assert begun == [True, False, False]


class Readings:
    """A meter that shows what it is given."""

    def __init__(self, readings: Iterator[float | None]) -> None:
        self._readings = readings

    def read_j(self) -> float | None:
        return next(self._readings)
