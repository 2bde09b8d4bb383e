"""What a router knows of prefix caches: by events, and without an event source by what it has sent."""

from __future__ import annotations

from structlog.testing import capture_logs

from pdserve.block_messages import BlockEvents
from pdserve.blockhash import hash_blocks
from pdserve.ids import WorkerRef
from pdserve.messages import StartDecode
from tests.unit.router.conversation import A, B, serve
from tests.unit.router.scripted import Cluster, ScriptedWorker, virtual

PROMPT = "x" * 400
HASHES = tuple(hash_blocks(tuple(PROMPT.encode()), 16, seed=b"seed"))


def sample(cluster: Cluster, name: str) -> float | None:
    return cluster.app.metrics.registry.get_sample_value(name)


async def drawn_to(cluster: Cluster, d: ScriptedWorker, prompt: str = PROMPT) -> WorkerRef | None:
    """Where this prompt would be prefilled; taken back at once."""
    client = cluster.generate(prompt)
    start = await d.expect(StartDecode)
    client.generation.close()
    await cluster.settle()
    return start.source


@virtual
async def test_without_events_it_warns_once_counts_and_predicts_from_what_it_sent() -> None:
    with capture_logs() as logs:
        async with Cluster() as cluster:
            p0, d = await cluster.pair()
            p1 = await cluster.prefill("p1")
            await cluster.link(p1, d)
            client = cluster.generate(PROMPT, max_tokens=2)
            source = (await d.expect(StartDecode)).source
            first, other = (p0, p1) if source == p0.ref else (p1, p0)
            await serve(first, d, A, B, start=d.got(StartDecode)[-1], prefill_s=0.4)
            await client.end()
            assert sample(cluster, "pdserve_workers_without_cache_events") == 0
            await cluster.advance(7.0)
            assert sample(cluster, "pdserve_workers_without_cache_events") == 3
            for _ in range(6):  # turn by turn if nothing were known
                assert await drawn_to(cluster, d) == first.ref
            assert await drawn_to(cluster, d, "y" * 400) == other.ref  # whose turn it is
            await cluster.advance(7.0)
    told = [entry["worker"] for entry in logs if entry["event"] == "cache_events.missing"]
    assert sorted(told) == ["d0", "p0", "p1"]


@virtual
async def test_events_are_believed_and_after_a_new_session_only_what_it_brings() -> None:
    async with Cluster() as cluster:
        p0, d = await cluster.pair()
        p1 = await cluster.prefill("p1")
        await cluster.link(p1, d)
        for worker in (p0, p1, d):
            worker.say(BlockEvents(whole=True, stored=(), removed=()))
        await cluster.advance(7.0)
        assert sample(cluster, "pdserve_workers_without_cache_events") == 0
        p1.say(BlockEvents(whole=False, stored=HASHES, removed=()))
        await cluster.settle()
        for _ in range(4):
            assert await drawn_to(cluster, d) == p1.ref
        p1.say(BlockEvents(whole=False, stored=(), removed=HASHES))
        await cluster.settle()
        assert {await drawn_to(cluster, d) for _ in range(6)} == {p0.ref, p1.ref}
        again = await cluster.prefill("p1")
        await cluster.link(again, d)
        await cluster.advance(7.0)
        assert sample(cluster, "pdserve_workers_without_cache_events") == 1
        again.say(BlockEvents(whole=True, stored=HASHES, removed=()))
        await cluster.advance(1.0)
        assert sample(cluster, "pdserve_workers_without_cache_events") == 0
        assert await drawn_to(cluster, d) == again.ref


@virtual
async def test_a_worker_that_lagged_and_tells_the_whole_set_again_is_counted() -> None:
    async with Cluster() as cluster:
        p, _ = await cluster.pair()
        member = cluster.app.fleet.get("p0")
        assert member is not None
        for number, stored in enumerate((HASHES[:3], HASHES[:5])):
            p.say(BlockEvents(whole=True, stored=stored, removed=()))
            await cluster.settle()
            assert member.cache.holds_exactly(stored)
            assert sample(cluster, "pdserve_cache_event_gaps_total") == number
