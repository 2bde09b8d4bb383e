"""Many different structures, one after another: what the router keeps of them is bounded."""

from __future__ import annotations

import asyncio
import os

import pytest
from prometheus_client import CollectorRegistry

from pdserve.clock import SystemClock
from pdserve.structure import Structure
from pdserve.tokenizer import Tokenizer
from router.metrics import RouterMetrics
from router.structures import Structures
from router.turns import Turns
from router.work import ThreadWork
from tests.integration.children.proving import bench
from tests.support.footprint import Footprint

TOKENIZER = Tokenizer.fake()
NUM_FIRST, NUM_ALL = 300, 1300


@pytest.mark.slow
async def test_a_thousand_different_schemas_leave_the_memory_flat() -> None:
    work = ThreadWork()
    async with bench() as b, asyncio.TaskGroup() as tasks:
        metrics = RouterMetrics(CollectorRegistry())
        structures = Structures(
            b.prover, Turns(work, SystemClock(), metrics, 1 << 20), tasks.create_task, SystemClock(), metrics
        )
        before = Footprint.of(os.getpid())
        for number in range(NUM_ALL):
            if number == NUM_FIRST:
                before = Footprint.of(os.getpid())
            fields = {f"field_{number}_{each}": {"type": "string"} for each in range(30)}
            compiled = await structures.compile(
                Structure.json_schema({"properties": fields}), TOKENIZER, user="u"
            )
            compiled.matcher((256,)).mask()
        after = Footprint.of(os.getpid())
        children = [Footprint.of(pid).rss_bytes >> 20 for pid in b.pids]
        print(f"{before.rss_bytes >> 20} → {after.rss_bytes >> 20} MiB; children {children}")
        assert after.rss_bytes < 1.1 * before.rss_bytes
        assert max(children) < 100
    work.close()
