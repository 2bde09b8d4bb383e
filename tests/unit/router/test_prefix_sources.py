"""What a router knows of prefix caches: by events, and without an event source by what it has sent."""

from __future__ import annotations

import asyncio

from structlog.testing import capture_logs

from pdserve.block_messages import BlocksRemoved, BlocksStored, CacheEvent, SnapshotPart
from pdserve.blockhash import hash_blocks
from pdserve.ids import WorkerRef
from pdserve.messages import StartDecode
from pdserve.worker.cache_feed import CacheFeed
from router.predicted_prefix import PredictedPrefix
from tests.support.memory_session import MemoryCacheEvents
from tests.unit.router.conversation import A, B, serve
from tests.unit.router.scripted import DELAY_S, Cluster, ScriptedWorker, virtual

PROMPT = "x" * 400
HASHES = tuple(hash_blocks(tuple(PROMPT.encode()), 16, seed=b"seed"))


def gauge(cluster: Cluster) -> float | None:
    return cluster.app.metrics.registry.get_sample_value("pdserve_workers_without_cache_events")


async def drawn_to(cluster: Cluster, d: ScriptedWorker, prompt: str = PROMPT) -> WorkerRef | None:
    """Where this prompt would be prefilled; taken back at once."""
    client = cluster.generate(prompt)
    start = await d.expect(StartDecode)
    client.generation.close()
    await cluster.settle()
    return start.source


class Feed:
    """A worker's events as the router reads them."""

    def __init__(self, cluster: Cluster, worker: ScriptedWorker) -> None:
        self.feed = CacheFeed()
        loop = asyncio.get_running_loop()
        events = MemoryCacheEvents(worker.ref, self.feed.subscribe, loop.call_later, lambda: DELAY_S)
        self.task = loop.create_task(cluster.app.attach_cache_events(events))

    async def end(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


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
            assert gauge(cluster) == 0
            await cluster.advance(7.0)
            assert gauge(cluster) == 3
            for _ in range(6):  # turn by turn if nothing were known
                assert await drawn_to(cluster, d) == first.ref
            assert await drawn_to(cluster, d, "y" * 400) == other.ref  # whose turn it is
            await cluster.advance(7.0)
    told = [entry["worker"] for entry in logs if entry["event"] == "cache_events.missing"]
    assert sorted(told) == ["d0", "p0", "p1"]


@virtual
async def test_events_are_believed_and_when_they_end_prediction_takes_over() -> None:
    async with Cluster() as cluster:
        p0, d = await cluster.pair()
        p1 = await cluster.prefill("p1")
        await cluster.link(p1, d)
        feeds = {worker: Feed(cluster, worker) for worker in (p0, p1, d)}
        await cluster.advance(7.0)
        assert gauge(cluster) == 0
        feeds[p1].feed.change([(True, block_hash) for block_hash in HASHES])
        await cluster.settle()
        for _ in range(4):
            assert await drawn_to(cluster, d) == p1.ref
        feeds[p1].feed.change([(False, block_hash) for block_hash in HASHES])
        await cluster.settle()
        assert {await drawn_to(cluster, d) for _ in range(6)} == {p0.ref, p1.ref}
        await feeds[p1].end()
        await cluster.advance(7.0)
        assert gauge(cluster) == 1
        again = Feed(cluster, p1)
        await cluster.advance(1.0)
        assert gauge(cluster) == 0
        for feed in (feeds[p0], feeds[d], again):
            await feed.end()


@virtual
async def test_a_gap_asks_for_a_snapshot_and_is_repaired_by_it() -> None:
    async with Cluster() as cluster:
        p, _ = await cluster.pair()
        sources, member = cluster.app.fleet.cache_sources, cluster.app.fleet.get("p0")
        assert member is not None
        story: list[tuple[CacheEvent, bool, int]] = [
            (SnapshotPart(1, HASHES[:1], True, True), False, 1),
            (BlocksStored(2, HASHES[1:2]), False, 2),
            (BlocksStored(4, HASHES[3:4]), True, 2),  # 3 is lost
            (BlocksRemoved(5, HASHES[:1]), False, 2),  # nothing is believed before the snapshot
            (SnapshotPart(6, HASHES[:2], True, False), False, 2),
            (SnapshotPart(6, HASHES[2:5], False, True), False, 5),
            (BlocksRemoved(7, HASHES[4:5]), False, 4),
        ]
        source = sources.opened(p.ref)
        for event, asks, num_known in story:
            assert sources.on_event(source, event) is asks
            assert member.known_blocks.num_hits(HASHES) == num_known
        assert cluster.app.metrics.registry.get_sample_value("pdserve_cache_event_gaps_total") == 1


@virtual
async def test_what_an_earlier_stream_still_brings_is_not_mixed_with_the_newest() -> None:
    async with Cluster() as cluster:
        p, _ = await cluster.pair()
        sources, member = cluster.app.fleet.cache_sources, cluster.app.fleet.get("p0")
        assert member is not None
        earlier = sources.opened(p.ref)
        sources.on_event(earlier, SnapshotPart(1, HASHES[:1], True, True))
        newest = sources.opened(p.ref)
        sources.on_event(newest, SnapshotPart(1, HASHES[:3], True, True))
        assert not sources.on_event(earlier, BlocksRemoved(2, HASHES[:1]))  # it has the number that is due
        assert not sources.on_event(earlier, BlocksStored(9, HASHES[4:5]))  # nor is anything asked of it
        sources.on_event(newest, BlocksStored(2, HASHES[3:4]))
        sources.closed(earlier)
        assert member.cache.holds_exactly(HASHES[:4])
        sources.closed(newest)
        assert not member.cache.has_begun


def test_a_prediction_forgets_what_was_used_least_lately_and_a_chain_from_its_end() -> None:
    predicted = PredictedPrefix(6)
    chains = [[bytes([n, k]) for k in range(4)] for n in range(3)]
    predicted.sent(chains[0])
    predicted.sent(chains[1])
    assert [predicted.num_hits(chain) for chain in chains] == [2, 4, 0]
    predicted.sent(chains[0][:2])
    predicted.sent(chains[2][:2])
    assert [predicted.num_hits(chain) for chain in chains] == [2, 2, 2]
    predicted.sent([bytes([9, k]) for k in range(50)])
    assert len(predicted) == 6
