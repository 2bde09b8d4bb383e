"""A probe is a request of its own on the pair that an operator names, and on no other."""

from __future__ import annotations

import asyncio
import random

import pytest

from pdserve.errors import NoWorker, UnknownWorker
from pdserve.messages import PairState, StartDecode, StartPrefill
from pdserve.probe import PairProbe
from router.probe import probe_pair
from tests.unit.router.scripted import Cluster, virtual


def probing(cluster: Cluster, prefill: str, decode: str, num_tokens: int = 40) -> asyncio.Task[PairProbe]:
    return asyncio.create_task(
        probe_pair(cluster.app, random.Random(1), prefill, decode, num_tokens, deadline_left_s=10.0)
    )


@virtual
async def test_it_goes_to_the_pair_that_is_named_whatever_others_would_cost() -> None:
    async with Cluster() as cluster:
        p0, d0 = await cluster.pair()
        d1 = await cluster.decode("d1")
        await cluster.link(p0, d1)
        for _ in range(4):  # by chance it would have gone to the other one of two equals
            probe = probing(cluster, "p0", "d1")
            start = await d1.expect(StartDecode)
            assert len(start.token_ids) == 40 and start.key.max_tokens == 2 and start.cache_salt
            d1.grant(start)
            prefill = await p0.expect(StartPrefill)
            p0.first(prefill, 65)
            d1.started(start, 65, received_bytes=640, transport="memfd")
            d1.tokens(start, 41, 66)
            d1.finished(start, 42)
            told = await probe
            assert (told.num_prompt_tokens, told.num_kv_bytes, told.transport) == (40, 640, "memfd")
            assert told.ttft_s >= 0
        assert not d0.got(StartDecode)


@virtual
async def test_its_prompt_is_cut_to_the_window() -> None:
    async with Cluster() as cluster:
        await cluster.pair()
        window = cluster.app.fleet.window_tokens
        probe = probing(cluster, "p0", "d0", 10 * window)
        await cluster.settle(0.01)
        (run,) = cluster.app.conductors[0].runs
        assert run.choice.num_prompt_tokens == window - 2
        probe.cancel()


@virtual
async def test_a_pair_that_takes_no_requests_is_told_at_once_and_why() -> None:
    async with Cluster() as cluster:
        await cluster.pair()
        await cluster.decode("d1")
        with pytest.raises(NoWorker, match="p0"):
            await probing(cluster, "p0", "d1")
        with pytest.raises(NoWorker, match="no pair"):
            await probing(cluster, "d0", "p0")
        with pytest.raises(UnknownWorker, match="p7"):
            await probing(cluster, "p7", "d0")
        cluster.app.operators.drain("p0", force=True)
        with pytest.raises(NoWorker, match="p0 takes no work"):
            await probing(cluster, "p0", "d0")


@virtual
async def test_a_pair_whose_link_is_down_says_why() -> None:
    async with Cluster() as cluster:
        p0, d0 = await cluster.pair()
        p0.say(PairState(d0.ref, up=False, reason="it broke", generation=2))
        await cluster.settle(0.01)
        with pytest.raises(NoWorker, match="it broke"):
            await probing(cluster, "p0", "d0")
        assert not cluster.app.conductors
