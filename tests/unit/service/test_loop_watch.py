"""Who held up the loop: the process itself, or the machine."""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry

from pdserve.service.loop_watch import PERIOD_S, LoopWatch
from tests.support.virtual_loop import VirtualLoop, run_virtual


def test_a_held_loop_is_seen_and_told_from_a_busy_machine() -> None:
    registry = CollectorRegistry()
    cpu_s = 0.0

    def total(name: str) -> float:
        value = registry.get_sample_value(f"pdserve_loop_{name}_seconds_sum")
        assert value is not None
        return round(value, 6)

    async def scenario() -> None:
        nonlocal cpu_s
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        clock = loop.clock
        watch = LoopWatch(registry, clock, lambda: cpu_s)
        watch.start()
        await asyncio.sleep(10 * PERIOD_S)
        assert (total("lag"), total("held")) == (0, 0)
        clock.advance_to(clock.now_s() + 0.5)  # a call that takes so long
        cpu_s += 0.5
        await asyncio.sleep(PERIOD_S)
        held_s = total("held")
        assert 0.5 - PERIOD_S <= held_s == total("lag") <= 0.5
        clock.advance_to(clock.now_s() + 2.0)  # others had the cores
        cpu_s += 0.01
        await asyncio.sleep(PERIOD_S)
        assert total("lag") >= held_s + 2.0 - PERIOD_S
        assert total("held") <= held_s + 0.01
        watch.stop()
        watch.stop()

    run_virtual(scenario(), limit_s=100)
