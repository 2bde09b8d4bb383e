"""Whole workers over in-memory ports under virtual time, against a router that is played by the test."""

from __future__ import annotations

import asyncio

from pdserve.engine import fake_rule
from pdserve.engine.fake_runner import FakeFaults
from pdserve.messages import (
    Abort,
    Credits,
    DecodeStarted,
    Drain,
    Failed,
    FirstToken,
    Granted,
    Heartbeat,
    Load,
    Pair,
    PairState,
    Role,
    SequenceFinished,
    SetRole,
    Superseded,
    Unsound,
    Waiting,
)
from pdserve.service.lifecycle import EXIT_OK, EXIT_SUPERSEDED, EXIT_UNSOUND
from tests.unit.node.cluster import IDS, KEY, Cluster, one_request, play


def test_a_prompt_goes_through_prefill_link_and_decode() -> None:
    async def scenario(cluster: Cluster) -> None:
        for name, role in (("p0", Role.PREFILL), ("d0", Role.DECODE)):
            cluster.start(name, role)
        await cluster.pair_up()
        assert isinstance(await cluster.router.until("p0", Credits), Credits)
        await one_request(cluster)
        await cluster.router.until("d0", SequenceFinished)
        assert cluster.tokens("d0") == fake_rule.expected_choice(IDS, KEY)
        first = await cluster.router.until("p0", FirstToken)
        assert isinstance(first, FirstToken) and first.token_id == cluster.tokens("d0")[0]
        await asyncio.sleep(1)
        for name in ("p0", "d0"):
            cluster.assert_at_rest(name)
            assert cluster.workers[name].not_ready == []
        beats = cluster.router.of("d0", Heartbeat)
        assert isinstance(beats[-1], Heartbeat) and beats[-1].num_steps == 11 and not beats[-1].has_work

    play(scenario)


def test_both_prefills_for_itself() -> None:
    async def scenario(cluster: Cluster) -> None:
        cluster.start("b0", Role.BOTH)
        await cluster.router.until("b0", Load)
        cluster.router.ends["b0"].send(cluster.start_decode(1, None))
        await cluster.router.until("b0", SequenceFinished)
        assert cluster.tokens("b0") == fake_rule.expected_choice(IDS, KEY)
        cluster.router.ends["b0"].send(Pair(cluster.router.hellos["b0"].worker, ("mem://x",)))
        state = await cluster.router.until("b0", PairState)
        assert isinstance(state, PairState) and not state.up and "both" in state.reason

    play(scenario)


def test_the_decode_workers_death_fails_the_prefill_and_keeps_its_cache() -> None:
    async def scenario(cluster: Cluster) -> None:
        for name, role in (("p0", Role.PREFILL), ("d0", Role.DECODE)):
            cluster.start(name, role)
        await cluster.pair_up()
        cluster.network.cut("d0", "p0")
        await one_request(cluster)
        await cluster.router.until("p0", FirstToken)
        failed = await cluster.router.until("p0", Failed)
        assert isinstance(failed, Failed) and failed.failure.error == "WorkerLost"
        states = cluster.router.of("p0", PairState)
        assert isinstance(states[-1], PairState) and not states[-1].up
        await asyncio.sleep(6)
        cluster.assert_at_rest("p0")
        current = cluster.workers["p0"].current
        assert current is not None and current.engine.pool.counts().cached == 6

    play(scenario)


def test_an_abort_to_both_leaves_nothing() -> None:
    async def scenario(cluster: Cluster) -> None:
        for name, role in (("p0", Role.PREFILL), ("d0", Role.DECODE)):
            cluster.start(name, role)
        await cluster.pair_up()
        await one_request(cluster)
        for name in ("p0", "d0"):
            cluster.router.ends[name].send(Abort(1))
        await asyncio.sleep(1)
        for name in ("p0", "d0"):
            cluster.assert_at_rest(name)

    play(scenario)


def test_drain_ends_with_zero_after_the_rest_is_served() -> None:
    async def scenario(cluster: Cluster) -> None:
        cluster.start("b0", Role.BOTH)
        await cluster.router.until("b0", Load)
        cluster.router.ends["b0"].send(cluster.start_decode(1, None))
        cluster.router.ends["b0"].send(Drain())
        assert await cluster.running["b0"] == EXIT_OK
        await cluster.router.until("b0", SequenceFinished)
        assert cluster.tokens("b0") == fake_rule.expected_choice(IDS, KEY)

    play(scenario)


def test_a_role_change_drains_rejoins_and_serves() -> None:
    async def scenario(cluster: Cluster) -> None:
        cluster.start("d0", Role.DECODE)
        cluster.start("p0", Role.DECODE)
        await cluster.router.until("p0", Load)
        cluster.router.ends["p0"].send(cluster.start_decode(9, None))
        cluster.router.ends["p0"].send(SetRole(Role.PREFILL))
        await cluster.router.until("p0", SequenceFinished)
        while cluster.router.hellos["p0"].role is not Role.PREFILL:
            await asyncio.sleep(0.1)
        assert cluster.router.hellos["p0"].role_generation == 1
        await cluster.pair_up()
        await one_request(cluster)
        await cluster.router.until("d0", SequenceFinished)
        assert cluster.tokens("d0") == fake_rule.expected_choice(IDS, KEY)

    play(scenario)


def test_superseded_ends_the_process() -> None:
    async def scenario(cluster: Cluster) -> None:
        cluster.start("d0", Role.DECODE)
        await cluster.router.until("d0", Load)
        cluster.router.ends["d0"].send(Superseded())
        assert await cluster.running["d0"] == EXIT_SUPERSEDED

    play(scenario)


def test_an_unsound_engine_ends_the_process_after_telling_the_routers() -> None:
    async def scenario(cluster: Cluster) -> None:
        cluster.start("b0", Role.BOTH, faults=FakeFaults(failing_steps=frozenset({1}), sound=False))
        await cluster.router.until("b0", Load)
        cluster.router.ends["b0"].send(cluster.start_decode(1, None))
        assert await cluster.running["b0"] == EXIT_UNSOUND
        failed = await cluster.router.until("b0", Failed)
        assert isinstance(failed, Failed) and failed.failure.error == "StepFailed"
        seen = cluster.router.seen["b0"]
        (last_word,) = cluster.router.of("b0", Unsound)
        assert isinstance(last_word, Unsound) and last_word.failure.error == "StepFailed"
        assert seen.index(failed) < seen.index(last_word), "what broke it is told by name first"

    play(scenario)


def test_a_start_decode_is_answered_in_time_whatever_the_engine_does() -> None:
    async def scenario(cluster: Cluster) -> None:
        cluster.start("d0", Role.DECODE)
        await cluster.router.until("d0", Load)
        cluster.router.ends["d0"].send(cluster.start_decode(1, None))
        await cluster.router.until("d0", SequenceFinished)
        assert not cluster.router.of("d0", Waiting), "an engine that answers itself needs no help"
        cluster.drivers["d0", "engine"].pause()  # between two steps, and gets no CPU
        asked_s = cluster.loop.time()
        cluster.router.ends["d0"].send(cluster.start_decode(2, None))
        waiting = await cluster.router.until("d0", Waiting)
        assert isinstance(waiting, Waiting) and waiting.handle == 2
        assert cluster.loop.time() - asked_s < 0.3  # of grant_s = 1
        cluster.drivers["d0", "engine"].resume()
        await asyncio.sleep(1.0)
        assert (
            len(cluster.router.of("d0", SequenceFinished)) == 2 and len(cluster.router.of("d0", Waiting)) == 1
        )

    play(scenario)


def test_what_a_worker_measures_begins_when_its_loop_has_read_the_command() -> None:
    async def scenario(cluster: Cluster) -> None:
        for name, role in (("p0", Role.PREFILL), ("d0", Role.DECODE)):
            cluster.start(name, role)
        await cluster.pair_up()
        cluster.drivers["p0", "engine"].pause()  # as in a long step
        cluster.loop.call_later(0.5, cluster.drivers["p0", "engine"].resume)
        await one_request(cluster)
        first = await cluster.router.until("p0", FirstToken)
        assert isinstance(first, FirstToken) and 0.45 < first.queue_s < 0.55

    play(scenario)


def test_a_hand_off_waits_for_its_first_step_from_confirm_on() -> None:
    async def scenario(cluster: Cluster) -> None:
        for name, role in (("p0", Role.PREFILL), ("d0", Role.DECODE)):
            cluster.start(name, role)
        await cluster.pair_up()
        await one_request(cluster)
        current = cluster.workers["d0"].current
        assert current is not None
        while current.transfer.metrics.handed_off_leases == 0:
            await asyncio.sleep(0.00005)  # its engine hasn't heard of it yet
        cluster.drivers["d0", "engine"].pause()
        cluster.loop.call_later(0.5, cluster.drivers["d0", "engine"].resume)
        finished = await cluster.router.until("d0", SequenceFinished)
        assert isinstance(finished, SequenceFinished) and 0.45 < finished.decode_queue_s < 0.55

    play(scenario)


def test_a_hanging_engine_is_found_and_ends_the_process() -> None:
    async def scenario(cluster: Cluster) -> None:
        worker = cluster.start("b0", Role.BOTH)
        await cluster.router.until("b0", Load)
        cluster.router.ends["b0"].send(cluster.start_decode(1, None))
        await cluster.router.until("b0", DecodeStarted)
        hung_s = cluster.loop.time()
        cluster.drivers["b0", "engine"].pause()
        assert await cluster.running["b0"] == EXIT_UNSOUND
        assert worker.end is not None and worker.end.hangs
        assert 5.0 < cluster.loop.time() - hung_s < 6.5
        beat = cluster.router.of("b0", Heartbeat)[-1]
        assert isinstance(beat, Heartbeat) and beat.has_work, "the router sees it too"
        assert isinstance(await cluster.router.until("b0", Unsound), Unsound)

    play(scenario)


def test_a_role_change_asked_of_a_leaving_worker_is_no_reason_to_stay() -> None:
    async def scenario(cluster: Cluster) -> None:
        worker = cluster.start("b0", Role.BOTH)
        await cluster.router.until("b0", Load)
        cluster.router.ends["b0"].send(cluster.start_decode(1, None))
        cluster.router.ends["b0"].send(SetRole(Role.PREFILL))
        await cluster.router.until("b0", Granted)
        worker.drain()
        assert worker.not_ready == ["draining"]
        assert await cluster.running["b0"] == EXIT_OK
        await cluster.router.until("b0", SequenceFinished)

    play(scenario)
