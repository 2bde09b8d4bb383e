"""In a large cluster a placement weighs a sample of the pairs; nothing that matters is left to the draw."""

from __future__ import annotations

from collections import Counter

from pdserve.block_messages import BlockEvents
from pdserve.blockhash import hash_blocks
from pdserve.errors import InvalidRequest
from pdserve.messages import Credits, PairState, StartDecode
from router.candidates import MOST_PAIRS
from tests.unit.router.scripted import Cluster, ScriptedWorker, config, virtual

NUM = 12  # workers of each role: 144 pairs
WIDE = config({"pairs_per_prefill": NUM})


async def large(cluster: Cluster) -> tuple[list[ScriptedWorker], list[ScriptedWorker]]:
    """All pairs are up."""
    prefills = [await cluster.prefill(f"p{n}") for n in range(NUM)]
    decodes = [await cluster.decode(f"d{n}") for n in range(NUM)]
    for prefill in prefills:
        await cluster.link(prefill, *decodes)
    assert cluster.app.fleet.topology.num_links > MOST_PAIRS
    return prefills, decodes


def last_placement(cluster: Cluster) -> tuple[str, str, int]:
    """Whom it chose, and how many candidates it weighed."""
    candidates = cluster.app.status(explain=True).placements[-1].candidates
    (chosen,) = [each for each in candidates if each.chosen]
    return chosen.prefill_worker, chosen.decode_worker, len(candidates)


@virtual
async def test_few_pairs_are_weighed_and_all_workers_have_their_share() -> None:
    async with Cluster(WIDE) as cluster:
        await large(cluster)
        counts: Counter[str] = Counter()
        for _ in range(NUM * 20):
            client = cluster.generate("hello")
            await cluster.settle(0.004)
            prefill, decode, num_weighed = last_placement(cluster)
            counts.update((prefill, decode))
            assert num_weighed < MOST_PAIRS
            client.generation.close()
            await cluster.advance(0.05)
        assert len(counts) == 2 * NUM and min(counts.values()) >= 0.5 * max(counts.values()), counts


@virtual
async def test_the_one_prefill_worker_that_holds_the_prompt_is_always_among_them() -> None:
    async with Cluster(WIDE) as cluster:
        prefills, _ = await large(cluster)
        prompt = "x" * 4_000
        hashes = tuple(hash_blocks(tuple(prompt.encode()), 16, seed=b"seed"))
        for number, each in enumerate(prefills):  # all of them hold the beginning, one all of it
            held = hashes if number == 7 else hashes[: 1 + number]
            each.say(BlockEvents(whole=True, stored=held, removed=()))
        await cluster.settle()
        for _ in range(20):
            client = cluster.generate(prompt)
            await cluster.settle(0.004)
            assert last_placement(cluster)[0] == "p7"
            client.generation.close()
            await cluster.advance(30.0)


@virtual
async def test_the_only_worker_with_credit_is_found() -> None:
    async with Cluster(WIDE) as cluster:
        prefills, _ = await large(cluster)
        for each in prefills[:-1]:
            each.say(Credits(0))
        await cluster.settle()
        client = cluster.generate("hello")
        await cluster.settle()
        assert last_placement(cluster)[0] == f"p{NUM - 1}"
        client.generation.close()


@virtual
async def test_without_any_credit_it_waits_and_says_why() -> None:
    async with Cluster(WIDE) as cluster:
        prefills, _ = await large(cluster)
        for each in prefills:
            each.say(Credits(0))
        await cluster.settle()
        client = cluster.generate("hello")
        await cluster.settle()
        (waiting,) = cluster.app.status(explain=True).placements
        assert waiting.attempt == 0
        assert {each.reason for each in waiting.candidates} == {f"no credit of p{n}" for n in range(NUM)}
        prefills[3].say(Credits(10_000))
        await cluster.settle()
        assert last_placement(cluster)[0] == "p3"
        client.generation.close()


@virtual
async def test_a_long_prompt_waits_for_a_prefill_worker_as_in_a_small_cluster() -> None:
    flags = {"pairs_per_prefill": NUM, "allow_local_prefill": True, "remote_prefill_tokens": 64}
    async with Cluster(config(flags)) as cluster:
        prefills, decodes = await large(cluster)
        for each in prefills:
            each.say(Credits(0))
        await cluster.settle()
        client = cluster.generate("x" * 400)
        await cluster.settle()
        assert not any(each.got(StartDecode) for each in decodes)
        prefills[3].say(Credits(10_000))
        await cluster.settle()
        assert last_placement(cluster)[0] == "p3"
        client.generation.close()


@virtual
async def test_what_fits_no_window_is_refused_at_once() -> None:
    async with Cluster(WIDE) as cluster:
        await large(cluster)
        client = await cluster.generate("x" * 5_000).end(within_s=1.0)
        assert isinstance(client.error, InvalidRequest)


@virtual
async def test_prefill_workers_without_a_pair_dont_hide_the_one_that_has_some() -> None:
    async with Cluster(WIDE) as cluster:
        prefills, decodes = await large(cluster)
        for prefill in prefills[1:]:
            for decode in decodes:
                prefill.say(PairState(decode.ref, False, reason="lost", generation=1))
        await cluster.settle()
        for _ in range(10):
            client = cluster.generate("hello")
            await cluster.settle()
            assert last_placement(cluster)[0] == "p0"
            client.generation.close()
            await cluster.advance(30.0)
