"""Structures tried in real child processes: killed at their limits, and nobody else held up."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from pdserve.children.frames import Proven
from pdserve.errors import InvalidRequest
from pdserve.structure import Structure
from tests.integration.children.proving import bench, eats_memory, endless, kill_all, slow, stop_all, ticks_of
from tests.support.pids import wait_gone
from tests.support.waiting import until

TOO_LONG = "json_schema takes longer to compile than children.compile_s (limit_s=2)"
EASY = [Structure.regex(f"easy{number}") for number in range(4)]


async def test_what_compiles_is_proven_once_and_what_does_not_is_refused_with_its_place() -> None:
    async with bench() as b:
        first = await b.outcome(EASY[0])
        assert isinstance(first, Proven) and first.num_bytes > 0
        assert await b.outcome(EASY[0]) is first
        bad = Structure.json_schema({"properties": {"a": {"type": "strin"}}})
        for _ in range(2):
            assert await b.outcome(bad) == (
                "json_schema can't be used (why=Invalid type: strin, place=#/properties/a)"
            )
        assert b.count("pdserve_child_cache_hits_total", kind="structure") == 2
        assert b.count("pdserve_child_job_seconds_count", kind="structure") == 2


async def test_endless_compiles_are_killed_at_their_limit_while_others_go_on() -> None:
    async with bench(limit_s=2.0, memory_bytes=1 << 30) as b:
        before = await b.warm()
        ended: list[str] = []

        async def compile_one(name: str, structure: Structure) -> None:
            found = await b.outcome(structure)
            ended.append(name)
            assert isinstance(found, Proven) if name == "easy" else found == TOO_LONG, found

        async with asyncio.TaskGroup() as tasks:
            for number in range(3):
                tasks.create_task(compile_one("endless", endless(number)))
            await asyncio.sleep(0)  # they are first in the line
            for easy in EASY:
                tasks.create_task(compile_one("easy", easy))
        assert ended == ["easy"] * 4 + ["endless"] * 3
        assert b.count("pdserve_child_kills_total", kind="structure", reason="time") == 3
        assert b.count("pdserve_child_kills_total", kind="slow_structure", reason="time") == 3
        for pid in before:
            await wait_gone(pid)
        # Known by now: no child is lost to it again for a while.
        assert await b.outcome(endless(0)) == TOO_LONG
        assert b.count("pdserve_child_job_seconds_count", kind="slow_structure") == 3


async def test_what_eats_memory_is_refused_and_the_next_has_all_of_it_again() -> None:
    async with bench(memory_bytes=16 << 20) as b:
        said = await b.outcome(eats_memory())
        assert said == "grammar needs more memory than children.memory_bytes (limit_bytes=16777216)"
        assert isinstance(await b.outcome(EASY[0]), Proven)


async def test_a_job_whose_child_is_killed_from_outside_is_done_by_another() -> None:
    async with bench() as b:
        await b.warm()
        asked = asyncio.create_task(b.outcome(slow()))

        async def at_work() -> list[int]:
            return [pid for pid in b.pids if ticks_of(pid) >= 3]

        kill_all(await until("a child has the job", at_work))
        assert "Unable to determine if regex is empty" in str(await asked)
        kinds = ("structure", "slow_structure")
        assert sum(b.count("pdserve_child_kills_total", kind=kind, reason="lost") for kind in kinds) == 1


async def test_a_job_that_loses_two_children_is_given_back() -> None:
    async with bench() as b:
        asked = asyncio.create_task(b.outcome(endless()))
        while not asked.done():
            kill_all(b.pids)
            await asyncio.sleep(0.01)
        assert (
            await asked == "the process that read json_schema was ended from outside, twice (retry_after_s=1)"
        )
        assert isinstance(await b.outcome(EASY[0]), Proven)


async def test_a_compile_that_nobody_waits_for_is_ended() -> None:
    async with bench() as b:
        before = await b.warm()
        two = [asyncio.create_task(b.outcome(endless())) for _ in range(2)]

        async def in_the_slow_lane() -> bool:
            return b.count("pdserve_child_kills_total", kind="structure", reason="time") == 1

        await until("it is slow", in_the_slow_lane)
        two[0].cancel()
        assert isinstance(await b.outcome(EASY[0]), Proven)
        assert b.count("pdserve_child_kills_total", kind="slow_structure", reason="cancelled") == 0
        two[1].cancel()

        async def all_gone() -> bool:
            return b.count("pdserve_child_kills_total", kind="slow_structure", reason="cancelled") == 1

        await until("its child is killed", all_gone)
        assert len(await b.warm()) == 3 and set(await b.warm()) != set(before)


async def test_no_more_wait_than_there_is_room_for() -> None:
    async with bench() as b:
        stop_all(await b.warm())
        asked = [asyncio.create_task(b.outcome(Structure.regex(f"a{number}"))) for number in range(2055)]
        first = next(asyncio.as_completed(asked))
        assert await first == "too many requests wait for structure (retry_after_s=1, limit=2048)"
        assert b.count("pdserve_child_jobs_refused_total", kind="structure") >= 1
        for task in asked:
            task.cancel()


async def test_many_of_one_tenant_hold_up_another_by_one() -> None:
    """Though all places are taken by alice's, bob has one, and it is his turn next."""
    async with bench() as b:
        children = await b.warm()
        stop_all(children)
        asked = [
            asyncio.create_task(b.outcome(Structure.regex(f"a{number}"), "alice")) for number in range(2055)
        ]
        await next(asyncio.as_completed(asked))
        bobs = asyncio.create_task(b.outcome(EASY[0], "bob"))
        for pid in children:
            os.kill(pid, signal.SIGCONT)
        assert isinstance(await bobs, Proven)
        assert sum(task.done() for task in asked) < 100
        for task in asked:
            task.cancel()


async def test_the_fork_server_may_die_too() -> None:
    async with bench() as b:
        children = await b.warm()
        kill_all([b.server.pid])
        for pid in children:
            await wait_gone(pid)
        assert isinstance(await b.outcome(EASY[1]), Proven)


async def test_children_see_nothing_of_the_environment_that_could_be_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("API_TOKEN", "kept-to-ourselves")
    async with bench() as b:
        for pid in [*await b.warm(), b.server.pid]:
            assert b"kept-to-ourselves" not in Path(f"/proc/{pid}/environ").read_bytes()
            assert len(os.listdir(f"/proc/{pid}/task")) == 1


async def test_many_optional_fields_are_refused_before_they_break() -> None:
    fields = {f"p{number}": {"type": "integer"} for number in range(1500)}
    inner = {"type": "object", "properties": fields}
    async with bench() as b:
        for schema in (inner, {"type": "object", "properties": {"a": inner}, "required": ["a"]}):
            assert "json_schema is too complex (why=Parser Error: Current row has" in str(
                await b.outcome(Structure.json_schema(schema))
            )


async def test_errors_are_the_requests() -> None:
    async with bench(limit_s=0.2) as b:
        with pytest.raises(InvalidRequest):
            await b.prover.prove(endless(), "")
