"""A worker's counters say what happened, and books that don't add up end it, as does a bug in a session."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from pdserve.engine import fake_rule
from pdserve.engine.block_pool import BlockState
from pdserve.engine.sequence import SequenceState
from pdserve.messages import (
    Abort,
    Failed,
    FirstToken,
    Load,
    Role,
    SequenceFinished,
    Step,
    Unpair,
    Unsound,
)
from pdserve.service.lifecycle import EXIT_UNSOUND
from tests.unit.node.cluster import IDS, KEY, Cluster, one_request, play


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


# --- books that don't add up


@pytest.mark.parametrize("role", [Role.BOTH, Role.DECODE])
def test_a_worker_whose_blocks_do_not_add_up_finishes_what_is_sound_and_ends(role: Role) -> None:
    async def scenario(cluster: Cluster) -> None:
        worker = cluster.start("b0", role)
        await cluster.router.until("b0", Load)
        cluster.router.ends["b0"].send(cluster.start_decode(1, None))
        await cluster.router.until("b0", Step)
        run = worker.current
        assert run is not None
        [lost] = run.engine.pool.allocate(1) or []  # a block that nobody will ever give back …
        run.engine.pool._counts[BlockState.FREE] -= 1  # … and a count that is wrong
        with capture_logs() as logs:
            assert await cluster.running["b0"] == EXIT_UNSOUND
        assert [log["condemned"] for log in logs if log["event"] == "worker.books_wrong"] == [[lost]]
        await cluster.router.until("b0", SequenceFinished)
        assert cluster.tokens("b0") == fake_rule.expected_choice(IDS, KEY)
        counts = run.engine.pool.counts()
        assert (counts.quarantined, counts.owned, counts.granted) == (1, 0, 0)
        assert run.engine.pool.adds_up()
        registry = cluster.metrics["b0"].registry
        assert registry.get_sample_value("pdserve_books_wrong_total", {"book": "blocks"}) == 1

    play(scenario)


def test_what_has_a_block_in_doubt_is_ended_for_another_worker() -> None:
    async def scenario(cluster: Cluster) -> None:
        cluster.start("b0", Role.BOTH)
        await cluster.router.until("b0", Load)
        cluster.router.ends["b0"].send(cluster.start_decode(1, None))
        await cluster.router.until("b0", Step)
        run = cluster.workers["b0"].current
        assert run is not None
        [seq] = run.engine.sequences
        run.engine.pool._free.append(seq.block_table[0])  # free, and a sequence's
        failed = await cluster.router.until("b0", Failed)
        assert isinstance(failed, Failed) and "in doubt" in failed.failure.message
        assert await cluster.running["b0"] == EXIT_UNSOUND

    play(scenario)


def test_a_block_that_is_owned_though_nothing_is_in_hand_is_noticed() -> None:
    async def scenario(cluster: Cluster) -> None:
        cluster.start("p0", Role.PREFILL)
        await cluster.router.until("p0", Load)
        run = cluster.workers["p0"].current
        assert run is not None
        run.engine.pool.allocate(1)
        assert await cluster.running["p0"] == EXIT_UNSOUND

    play(scenario)


def test_credits_and_leases_are_books_too() -> None:
    async def scenario(cluster: Cluster) -> None:
        await a_pair(cluster)
        prefill, decode = cluster.workers["p0"].current, cluster.workers["d0"].current
        assert prefill is not None and decode is not None
        prefill.core._num_queued_tokens += 1  # type: ignore[attr-defined]
        decode.transfer.metrics.opened_leases += 1
        assert await cluster.running["p0"] == EXIT_UNSOUND
        assert await cluster.running["d0"] == EXIT_UNSOUND

    play(scenario)


# --- bugs in the loop's own part


def test_a_bug_that_a_routers_message_meets_ends_the_worker() -> None:
    async def scenario(cluster: Cluster) -> None:
        worker = cluster.start("p0", Role.PREFILL)
        await cluster.router.until("p0", Load)
        run = worker.current
        assert run is not None
        run._links._wanted.clear()
        cluster.router.ends["p0"].send(Unpair(cluster.router.hellos["p0"].worker))
        assert await cluster.running["p0"] == EXIT_UNSOUND

    play(scenario)


def test_a_bug_that_an_owners_message_meets_ends_the_worker() -> None:
    async def scenario(cluster: Cluster) -> None:
        worker = cluster.start("p0", Role.PREFILL)
        await cluster.router.until("p0", Load)
        run = worker.current
        assert run is not None
        cluster.to_loop["p0"](object())
        assert await cluster.running["p0"] == EXIT_UNSOUND
        await cluster.router.until("p0", Unsound)

    play(scenario)


def test_every_state_has_a_gauge() -> None:
    async def scenario(cluster: Cluster) -> None:
        await a_pair(cluster)
        cluster.router.ends["d0"].send(cluster.start_decode(1, cluster.router.hellos["p0"].worker))
        await asyncio.sleep(2)

        def shown(name: str) -> dict[str, float]:
            [family] = [each for each in cluster.metrics["d0"].registry.collect() if each.name == name]
            return {sample.labels["state"]: sample.value for sample in family.samples}

        assert shown("pdserve_worker_attempts") == {"waiting": 0, "granted": 1, "active": 0, "ended": 0}
        leases = shown("pdserve_lease_states")
        assert leases["granted"] == 1 == sum(leases.values()) and len(leases) == 6
        assert set(shown("pdserve_sequences")) == {state.value for state in SequenceState}
        assert shown("pdserve_kv_blocks")["granted"] > 0
        cluster.router.ends["d0"].send(Abort(1))
        await asyncio.sleep(2)
        assert (
            sum(shown("pdserve_worker_attempts").values()) == sum(shown("pdserve_lease_states").values()) == 0
        )

    play(scenario)
