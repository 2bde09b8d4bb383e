"""A worker's counters say what happened, and books that don't add up end it, as does a bug in a session."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from pdserve.messages import Abort, FirstToken, Role
from tests.unit.node.cluster import KEY, Cluster, one_request, play


async def a_pair(cluster: Cluster) -> None:
    for name, role in (("p0", Role.PREFILL), ("d0", Role.DECODE)):
        cluster.start(name, role)
    await cluster.pair_up()


def test_a_request_of_one_token_is_no_failed_hand_off() -> None:
    async def scenario(cluster: Cluster) -> None:
        await a_pair(cluster)
        await one_request(cluster, key=replace(KEY, max_tokens=1))
        first = await cluster.router.until("p0", FirstToken)
        assert isinstance(first, FirstToken) and first.final
        cluster.router.ends["d0"].send(Abort(1))
        await asyncio.sleep(1)
        for name in ("p0", "d0"):
            current = cluster.workers[name].current
            assert current is not None
            metrics = current.transfer.metrics
            assert (metrics.opened_leases, metrics.aborted_leases, metrics.failed_leases) == (1, 1, 0)
            assert metrics.leases_add_up and metrics.open_leases == 0

    play(scenario)
