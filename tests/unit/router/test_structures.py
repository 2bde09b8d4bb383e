"""Structures in the router: compiled once and in time, before anything is reserved; tokens checked against them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import pytest
from prometheus_client import CollectorRegistry

from pdserve.children.frames import Proven
from pdserve.children.prover import InlineProver, Prover
from pdserve.errors import InvalidRequest, InvariantViolated
from pdserve.messages import StartDecode, StartPrefill
from pdserve.request import Resume, ResumeChoice
from pdserve.sampling import FinishReason
from pdserve.structure import Structure
from pdserve.tokenizer import Tokenizer
from router.metrics import RouterMetrics
from router.structures import Structures
from router.turns import Turns
from router.work import InlineWork, Work
from tests.support.virtual_clock import VirtualClock
from tests.support.virtual_loop import VirtualLoop
from tests.unit.router.conversation import A, B, C, until_running
from tests.unit.router.scripted import Cluster, virtual

T = TypeVar("T")
ENDLESS = Structure.regex("endless")
TOKENIZER = Tokenizer.fake()


class SlowWork:
    """Takes its time. num_begun: how many calls."""

    def __init__(self) -> None:
        self.num_begun = 0

    async def run(self, call: Callable[[], T], /) -> T:
        self.num_begun += 1
        await asyncio.sleep(0.01)
        return call()


def clock() -> VirtualClock:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop.clock


def sample(metrics: RouterMetrics, name: str, **labels: str) -> float:
    return metrics.registry.get_sample_value(name, labels) or 0.0


class SlowProver:
    """Takes its time, and refuses some."""

    def __init__(self, takes_s: float = 0.0) -> None:
        self._takes_s = takes_s
        self.num_begun = self.num_given_up = 0

    async def prove(self, structure: Structure, user: str) -> Proven:
        self.num_begun += 1
        try:
            await asyncio.sleep(self._takes_s)
        except asyncio.CancelledError:
            self.num_given_up += 1
            raise
        if structure == ENDLESS:
            raise InvalidRequest("regex takes longer to compile than children.compile_s", limit_s=2)
        return Proven(0.001, 4 << 20)


def made(
    tasks: asyncio.TaskGroup, work: Work, prover: Prover | None = None, metrics: RouterMetrics | None = None
) -> Structures:
    metrics = metrics or RouterMetrics(CollectorRegistry())
    turns = Turns(work, clock(), metrics, 1 << 20)
    return Structures(prover or InlineProver(), turns, tasks.create_task, clock(), metrics)


@virtual
async def test_equal_structures_are_compiled_once() -> None:
    async with asyncio.TaskGroup() as tasks:
        work, metrics = SlowWork(), RouterMetrics(CollectorRegistry())
        structures = made(tasks, work, metrics=metrics)
        asking = [
            tasks.create_task(structures.compile(Structure.regex("ab?"), TOKENIZER, user="u"))
            for _ in range(5)
        ]
        await asyncio.sleep(1)
        again = await structures.compile(Structure.regex("ab?"), TOKENIZER, user="u")
        assert all(task.result() is again for task in asking)
        assert work.num_begun == 2  # the vocabulary, and this
        assert sample(metrics, "pdserve_structures_compiled_total", kind="regex") == 1
        assert sample(metrics, "pdserve_structure_cache_hits_total") == 5
        assert sample(metrics, "pdserve_structure_compile_seconds_count") == 1


@virtual
async def test_whoever_waits_for_a_compile_gets_it_though_the_first_to_ask_has_gone() -> None:
    async with asyncio.TaskGroup() as tasks:
        structures = made(tasks, SlowWork())
        first = tasks.create_task(structures.compile(Structure.regex("a"), TOKENIZER, user="u"))
        await asyncio.sleep(0.015)
        second = tasks.create_task(structures.compile(Structure.regex("a"), TOKENIZER, user="u"))
        await asyncio.sleep(0)
        first.cancel()
        assert (await second).matcher(()) is not None


@virtual
async def test_a_compile_that_nobody_waits_for_is_given_up() -> None:
    async with asyncio.TaskGroup() as tasks:
        prover = SlowProver(takes_s=10.0)
        structures = made(tasks, SlowWork(), prover)
        asking = [
            tasks.create_task(structures.compile(Structure.regex("a"), TOKENIZER, user="u")) for _ in range(2)
        ]
        await asyncio.sleep(5)
        asking[0].cancel()
        await asyncio.sleep(1)
        assert (prover.num_begun, prover.num_given_up) == (1, 0)
        asking[1].cancel()
        await asyncio.sleep(1)
        assert (prover.num_begun, prover.num_given_up) == (1, 1)


@virtual
async def test_what_is_not_proven_is_never_compiled_here() -> None:
    async with asyncio.TaskGroup() as tasks:
        work, metrics = SlowWork(), RouterMetrics(CollectorRegistry())
        structures = made(tasks, work, SlowProver(), metrics)
        for _ in range(2):
            with pytest.raises(InvalidRequest, match=r"takes longer to compile than children.compile_s"):
                await structures.compile(ENDLESS, TOKENIZER, user="u")
        assert sample(metrics, "pdserve_structures_refused_total", kind="regex") == 2
        assert work.num_begun == 1  # the vocabulary


@virtual
async def test_what_is_kept_is_bounded_by_what_compiling_took() -> None:
    """Each takes 4 MiB, says its proof."""
    async with asyncio.TaskGroup() as tasks:
        prover = SlowProver()
        structures = made(tasks, SlowWork(), prover)
        for text in ("a", *(f"b{number}" for number in range(16)), "a"):
            await structures.compile(Structure.regex(text), TOKENIZER, user="u")
        assert prover.num_begun == 18  # the first was forgotten: 64 MiB don't hold 17


@virtual
async def test_another_tokenizer_has_another_vocabulary() -> None:
    async with asyncio.TaskGroup() as tasks:
        work = SlowWork()
        structures = made(tasks, work)
        first = await structures.compile(Structure.regex("a"), TOKENIZER, user="u")
        assert await structures.compile(Structure.regex("a"), Tokenizer.fake(300), user="u") is not first
        assert work.num_begun == 4


# --- in a request


@virtual
async def test_a_bad_structure_is_refused_before_any_reservation() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        client = cluster.generate("hello", structure=Structure.regex("a(b"))
        await client.end()
        assert isinstance(client.error, InvalidRequest)
        assert str(client.error) == "regex can't be used (why=unclosed group, offset=1)"
        assert not d.got(StartDecode) and not p.got(StartPrefill)


@virtual
async def test_settings_that_leave_no_first_token_are_refused() -> None:
    async with Cluster() as cluster:
        _, d = await cluster.pair()
        structure = Structure.choices(["abc", "b"])
        for fields in ({"allowed_token_ids": (C,)}, {"banned_token_ids": (A, B)}, {"bad_words": ("a", "b")}):
            client = cluster.generate("hello", structure=structure, **fields)
            await client.end()
            assert isinstance(client.error, InvalidRequest)
            assert "rule out all that choices may begin with" in str(client.error)
        assert not d.got(StartDecode)
        client = cluster.generate("hello", structure=structure, banned_token_ids=(A,))
        assert (await d.expect(StartDecode)).key.params.structure == structure
        client.generation.close()


@virtual
async def test_the_structures_end_is_found_by_the_router_too() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        client, start = await until_running(cluster, p, d, structure=Structure.choices(["abc", "ca"]))
        d.tokens(start, 7, C)
        d.finished(start, 8, FinishReason.STRUCTURE)
        await client.end()
        assert (client.ids(), client.text()) == ([A, B, C], "abc")
        assert client.finished().reason is FinishReason.STRUCTURE


@virtual
async def test_a_whole_first_token_needs_no_decode_worker() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        client = cluster.generate("hello", structure=Structure.choices(["a", "b"]))
        start = await d.expect(StartDecode)
        d.grant(start)
        p.first(await p.expect(StartPrefill), B, FinishReason.STRUCTURE)
        await client.end()
        assert client.ids() == [B] and client.finished().reason is FinishReason.STRUCTURE


@virtual
async def test_a_token_that_breaks_the_structure_is_not_shown() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        client, start = await until_running(cluster, p, d, structure=Structure.choices(["abc"]))
        d.tokens(start, 7, A)
        await client.end()
        assert isinstance(client.error, InvariantViolated)
        assert "a worker's token breaks the structure" in str(client.error)
        assert client.ids() == [A, B]


@virtual
async def test_resume_follows_the_structure() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        structure = Structure.choices(["abc", "abcab"])
        held = cluster.generate(
            "hello", max_tokens=9, structure=structure, seed=5, resume=Resume(5, (ResumeChoice((A, B)),))
        )
        start = await d.expect(StartDecode)
        assert start.token_ids == (*b"hello", A, B)
        d.grant(start)
        p.first(await p.expect(StartPrefill), C)
        d.started(start, C)
        d.tokens(start, 8, A)
        d.tokens(start, 9, B)
        d.finished(start, 10, FinishReason.STRUCTURE)
        await held.end()
        assert held.ids() == [C, A, B]


@virtual
async def test_resume_with_a_whole_text_ends_at_once() -> None:
    async with Cluster() as cluster:
        await cluster.pair()
        structure = Structure.choices(["abc"])
        client = cluster.generate(
            "hello", structure=structure, seed=5, resume=Resume(5, (ResumeChoice((A, B, C)),))
        )
        await client.end()
        assert client.error is None and client.finished().reason is FinishReason.STRUCTURE


@virtual
async def test_resume_with_other_tokens_is_refused() -> None:
    async with Cluster() as cluster:
        _, d = await cluster.pair()
        client = cluster.generate(
            "hello", structure=Structure.choices(["abc"]), seed=5, resume=Resume(5, (ResumeChoice((A, C)),))
        )
        await client.end()
        assert isinstance(client.error, InvalidRequest)
        assert "resume.token_ids are no beginning of the structure (choice=0, index=1, value=99)" in str(
            client.error
        )
        assert not d.got(StartDecode)


@virtual
async def test_inline_work_compiles_at_once() -> None:
    async with asyncio.TaskGroup() as tasks:
        structures = made(tasks, InlineWork())
        compiled = await structures.compile(Structure.choices(["a"]), TOKENIZER, user="u")
        matcher = compiled.matcher((), (A,))
        assert matcher.is_complete
