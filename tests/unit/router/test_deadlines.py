"""A request that can't make its deadline by the estimate is refused at once, with the estimate."""

from __future__ import annotations

import pytest

from pdserve.errors import DeadlineExceeded, Overloaded
from pdserve.messages import Credits, StartDecode, Waiting
from pdserve.request import Resume, ResumeChoice
from router.queue_speed import QueueSpeed
from tests.unit.router.conversation import A, B, until_running
from tests.unit.router.scripted import Client, Cluster, ScriptedWorker, load, virtual


def refused(cluster: Cluster) -> float | None:
    return cluster.app.metrics.registry.get_sample_value(
        "pdserve_queue_refused_total", {"reason": "deadline"}
    )


def estimate_of(client: Client) -> float:
    assert isinstance(client.error, Overloaded), client.error
    assert client.error.retry_after_s > 0
    return float(str(client.error.fields["estimate_s"]))


@virtual
async def test_a_prompt_that_takes_longer_than_its_deadline_is_not_begun() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()  # 1,000 tokens a second
        client = await cluster.generate("x" * 3000, deadline_left_s=2.0).end()
        assert estimate_of(client) == pytest.approx(3.0, abs=0.1)
        assert cluster.clock.now_s() % 1 < 0.1 and not d.got(StartDecode)
        in_time = cluster.generate("x" * 3000, deadline_left_s=3.5)
        await d.expect(StartDecode)
        assert refused(cluster) == 1
        in_time.generation.close()
        p.say(load(num_queued_tokens=60_000, num_queued_short_tokens=60_000))
        await cluster.settle()
        client = await cluster.generate("x", deadline_left_s=30.0).end()
        assert estimate_of(client) == pytest.approx(60.0, rel=0.05)
        assert client.error is not None and client.error.fields["deadline_left_s"] == 30.0


@virtual
async def test_what_one_chunk_does_is_not_refused_for_the_long_prompts_that_wait() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        p.say(load(num_queued_tokens=60_000))
        await cluster.settle()
        client = cluster.generate("x" * 100, deadline_left_s=3.0)
        await d.expect(StartDecode)
        assert not refused(cluster)
        client.generation.close()
        await cluster.generate("x" * 600, deadline_left_s=3.0).end()
        assert refused(cluster) == 1


@virtual
async def test_without_reports_or_observations_nobody_is_refused() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        p.say(load(prefill_tokens_per_s=0.0, num_queued_tokens=60_000))
        await cluster.settle()
        client = cluster.generate("x" * 3000, deadline_left_s=0.5)
        await d.expect(StartDecode)
        await cluster.advance(1.0)
        await client.end()
        assert isinstance(client.error, DeadlineExceeded)


@virtual
async def test_a_rate_that_an_idle_worker_told_long_ago_refuses_nobody() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        p.say(load(prefill_tokens_per_s=1.0))  # as after a step in which its machine did something else
        await cluster.settle()
        client = await cluster.generate("x" * 3000, deadline_left_s=100.0).end()
        assert estimate_of(client) == pytest.approx(3000.0, rel=0.1)
        await cluster.advance(31.0)
        tried = cluster.generate("x" * 3000, deadline_left_s=100.0)
        await d.expect(StartDecode)
        tried.generation.close()


async def steady_queue(cluster: Cluster, p: ScriptedWorker, d: ScriptedWorker) -> list[Client]:
    """Credit for one prompt every 2 s, six of which wait."""
    p.say(Credits(0))
    await cluster.settle()
    clients = [cluster.generate("hello", user="busy") for _ in range(10)]
    for num_started in range(4):
        p.say(Credits(5 * num_started + 1))  # what was sent and not answered counts against it
        d.say(Waiting((await d.expect(StartDecode)).handle, 0))
        p.say(Credits(0))
        await cluster.advance(2.0)
    return clients


@virtual
async def test_those_ahead_count_by_the_pace_of_the_queue_and_by_whose_turn_it_is() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        clients = await steady_queue(cluster, p, d)
        assert cluster.app.admission.num_waiting == 6
        late = await cluster.generate("hello", user="busy", deadline_left_s=5.0).end()
        assert estimate_of(late) == pytest.approx(6 * 2.0, rel=0.1)
        patient = cluster.generate("hello", user="busy", deadline_left_s=15.0)
        other = cluster.generate(
            "hello", user="other", deadline_left_s=5.0
        )  # its turn comes after one of theirs
        await cluster.settle()
        assert not patient.done and not other.done
        urgent = cluster.generate("hello", user="busy", priority=1, deadline_left_s=1.5)
        await cluster.settle()
        assert not urgent.done and refused(cluster) == 1
        for client in (*clients, patient, other, urgent):
            client.generation.close()


@virtual
async def test_what_a_client_reads_already_is_never_refused() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        client, _ = await until_running(cluster, p, d, max_tokens=50, deadline_left_s=20.0)
        p.say(load(num_queued_tokens=600_000))
        d.die()
        await cluster.advance(1.0)
        d1 = await cluster.decode("d1")
        await cluster.link(p, d1)
        assert (await d1.expect(StartDecode)).token_ids[-2:] == (A, B)
        resumed = cluster.generate(
            "hello", seed=3, resume=Resume(3, (ResumeChoice((A,)),)), deadline_left_s=5.0, max_tokens=9
        )
        await d1.expect(StartDecode)
        client.generation.close()
        resumed.generation.close()


def test_the_speed_is_that_of_a_queue_that_moves() -> None:
    speed = QueueSpeed()
    assert speed.wait_s(5, 0.0) == 0.0
    for n in range(20):  # each comes to an empty queue: says nothing
        speed.started(n * 10.0, others_wait=False)
    assert speed.wait_s(5, 200.0) == 0.0
    for n in range(21):
        speed.started(200.0 + n * 0.5, others_wait=n < 20)
    assert speed.wait_s(4, 300.0) == pytest.approx(2.0)
    speed.started(300.0, others_wait=True)
    assert speed.wait_s(4, 302.0) == pytest.approx(8.0)  # it stands still
    speed.emptied()
    assert speed.wait_s(4, 303.0) == pytest.approx(2.0)
