"""What happens when something breaks, where real processes and sockets add something to the simulation.

The rows are those of failures.md. Workers that are stopped: test_stopped_workers.py; killed under `pdserve up`:
test_killed_workers.py; lost routers: test_lost_router.py; misfits: e2e/test_mistakes.py.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from random import Random

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.client import AsyncClient
from pdserve.errors import DeadlineExceeded, NoWorker
from pdserve.request import Resume, ResumeChoice, Tokens
from pdserve.rpc.v1.inference_pb2_grpc import InferenceStub
from pdserve.service.lifecycle import EXIT_SUPERSEDED
from pdserve.service.rpc import INFERENCE
from tests.support.asking import Question, ask, at_rest
from tests.support.singles import Single, Singles
from tests.support.waiting import LIMIT_S, until

HEARTBEAT_S = 0.1
COMMON = ("--timeouts.heartbeat-s", f"{HEARTBEAT_S}", "--timeouts.grant-s", "4")
FAKE = ("--engine", "fake", "--engine.num-blocks", "1024")
SMALL_CHUNKS = (
    "--engine.max-step-tokens",
    "2",
)  # a long prompt takes seconds, and its blocks leave all the while
LONG_PROMPT = 8_000
HALF_BYTES = LONG_PROMPT * 32 // 2  # the fake engine's KV of a token is 32 bytes
WORKERS = ["p0", "p1", "d0", "d1"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Singles]:
    """Two workers of each role. What a test breaks it repairs; what one that failed left broken `client` does."""
    with Singles(tmp_path_factory.mktemp("failures"), *COMMON) as made:
        made.router("r0", "--timeouts.client-stall-s", "2")
        for name in ("p0", "p1"):
            made.worker("prefill", name, *FAKE, *SMALL_CHUNKS)
        for name in ("d0", "d1"):
            made.worker("decode", name, *FAKE)
        yield made.start()


@pytest.fixture
async def client(cluster: Singles) -> AsyncIterator[AsyncClient]:
    """A client of a cluster that holds nothing for anybody, before the test and behind it."""
    cluster.start()
    async with AsyncClient(cluster.all["r0"].address) as made:
        await at_rest(made, WORKERS, heartbeat_s=HEARTBEAT_S)
        yield made
        await at_rest(made, WORKERS, heartbeat_s=HEARTBEAT_S)


async def holding_a_lease(workers: list[Single]) -> Single | None:
    for worker in workers:
        if await worker.metric("pdserve_leases"):
            return worker
    return None


async def received_bytes(workers: list[Single]) -> dict[str, float]:
    return {
        worker.id: await worker.metric("pdserve_kv_transfer_bytes_total", direction="received")
        for worker in workers
    }


def of_role(cluster: Singles, role: str) -> list[Single]:
    return [worker for worker in cluster.workers if worker.role == role]


# --- row 1: the client goes away


@pytest.mark.parametrize("phase", ["prefilling", "streaming"])
@pytest.mark.parametrize("how", ["cancelled", "deadline"])
async def test_a_client_that_is_gone_leaves_nothing_behind(
    cluster: Singles, client: AsyncClient, phase: str, how: str
) -> None:
    """`at_rest` behind the test says that its work has stopped."""
    size = (LONG_PROMPT, 10) if phase == "prefilling" else (50, 7_000)
    question = Question.draw(Random(f"{phase} {how}"), *size)
    request = question.request
    if (how, phase) == (
        "deadline",
        "prefilling",
    ):  # what a client reads already isn't refused for its deadline
        request = replace(request, resume=Resume(question.seed, (ResumeChoice(tuple(question.answer[:1])),)))
    events = client.generate(request, deadline_s=0.5 if how == "deadline" else None)

    async def read_on() -> None:
        async with aclosing(events) as stream:
            async for event in stream:
                if how == "cancelled" and phase == "streaming" and isinstance(event, Tokens):
                    return  # leaving the iteration cancels the request

    reading = asyncio.create_task(read_on())
    if how == "deadline":
        with pytest.raises(DeadlineExceeded):
            await reading
    elif phase == "streaming":
        await reading
    else:
        await until("a lease is open", lambda: holding_a_lease(of_role(cluster, "prefill")))
        reading.cancel()
        await asyncio.wait([reading])


# --- row 6: the decode worker dies before the hand-off


async def test_a_decode_worker_dies_in_mid_pull_and_nothing_is_computed_twice(
    cluster: Singles, client: AsyncClient
) -> None:
    """The prefill worker still has the blocks: they go to the other decode worker."""
    question = Question.draw(Random("row 6"), LONG_PROMPT, 20)
    decodes = of_role(cluster, "decode")
    before = await received_bytes(decodes)
    answer = asyncio.create_task(ask(client, question))

    async def in_mid_pull() -> Single | None:
        # Half of it must be there: for a few blocks alone no prefill worker is worth coming back to.
        now = await received_bytes(decodes)
        return next((worker for worker in decodes if now[worker.id] - before[worker.id] > HALF_BYTES), None)

    victim = await until("a decode worker in mid-pull", in_mid_pull)
    victim.send(signal.SIGKILL)
    finished = await answer
    assert finished.decode_worker != victim.id
    assert finished.num_attempts == 2
    assert finished.usage.num_cached_tokens > 0
    await asyncio.to_thread(victim.wait)
    victim.start()


# --- row 11: a worker restarts at the same address


@pytest.mark.parametrize("role", [pytest.param("prefill", marks=pytest.mark.slow), "decode"])
async def test_a_worker_that_restarts_at_its_address_is_a_new_one(
    cluster: Singles, client: AsyncClient, role: str
) -> None:
    random = Random(role)
    worker = of_role(cluster, role)[0]
    before = {each.id: each.epoch for each in (await client.status()).workers}
    begun = [asyncio.Event() for _ in range(8)]
    answers = [
        asyncio.create_task(ask(client, Question.draw(random, random.randint(10, 300), 7_000), setting(each)))
        for each in begun
    ]
    async with asyncio.timeout(LIMIT_S):
        for each in begun:
            await each.wait()
    assert not all(answer.done() for answer in answers), "or nothing was lost with the worker"
    await asyncio.to_thread(worker.kill)
    worker.start()
    for answer in answers:
        assert (await answer).num_attempts <= 2
    await at_rest(client, WORKERS, heartbeat_s=HEARTBEAT_S)
    after = {each.id: each.epoch for each in (await client.status()).workers}
    assert {name for name in after if after[name] != before[name]} == {worker.id}


def setting(event: asyncio.Event) -> Callable[[int], None]:
    return lambda num_tokens: event.set()


# --- row 12: two processes with one worker id


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_of_two_processes_with_one_id_the_later_stays(
    cluster: Singles, client: AsyncClient, role: str
) -> None:
    earlier = of_role(cluster, role)[0]
    epoch = {each.id: each.epoch for each in (await client.status()).workers}[earlier.id]
    later = cluster.twin(earlier).start()
    assert await asyncio.to_thread(earlier.wait) == EXIT_SUPERSEDED
    await later.ready()
    await at_rest(client, WORKERS, heartbeat_s=HEARTBEAT_S)
    status = await client.status()
    assert {each.id: each.epoch for each in status.workers}[earlier.id] != epoch
    await ask(client, Question.draw(Random(role), 100, 20))
    assert later.runs
    assert await asyncio.to_thread(later.terminate) == 0
    earlier.start()


# --- row 14: hundreds of streams lost at once


async def test_a_lost_session_with_a_hundred_streams_makes_no_storm(
    cluster: Singles, client: AsyncClient
) -> None:
    """Replays run two at a time per prefill worker."""
    random = Random("row 14")
    begun = asyncio.Semaphore(0)
    questions = [Question.draw(random, 20, 1_000) for _ in range(100)]
    answers = [asyncio.create_task(ask(client, question, at_first(begun.release))) for question in questions]
    victim = of_role(cluster, "decode")[0]
    most = 0.0

    async def all_are_done() -> bool:
        nonlocal most
        most = max(most, await cluster.all["r0"].metric("pdserve_replays_running"))
        return all(answer.done() for answer in answers)

    for _ in range(80):
        await begun.acquire()
    await asyncio.to_thread(victim.kill)
    victim.start()
    await until("all answers", all_are_done)
    assert max([(await answer).num_attempts for answer in answers]) == 2
    assert most <= 4


def at_first(tell: Callable[[], object]) -> Callable[[int], None]:
    """For `ask`: tells once that tokens come."""
    told = False

    def on_tokens(num_tokens: int) -> None:
        nonlocal told
        if not told:
            told = True
            tell()

    return on_tokens


# --- row 20: nobody of a role is there


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_requests_wait_for_a_missing_role_and_health_says_so(
    cluster: Singles, client: AsyncClient, role: str
) -> None:
    workers = of_role(cluster, role)
    async with grpc.aio.insecure_channel(cluster.all["r0"].address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=INFERENCE))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        for worker in workers:
            worker.send(signal.SIGTERM)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        for worker in workers:
            assert await asyncio.to_thread(worker.wait) == 0
        answer = asyncio.create_task(ask(client, Question.draw(Random(role), 100, 20)))
        with pytest.raises(DeadlineExceeded):
            await client.generate_text((1, 2, 3), deadline_s=0.5)
        for worker in workers:
            worker.start()
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        assert (await answer).num_attempts == 1
        watch.cancel()


async def test_after_worker_wait_the_missing_role_is_named(cluster: Singles) -> None:
    """A router that no prefill worker dials, and one that lets a decode worker prefill."""
    waits = cluster.router("r-waits", "--timeouts.worker-wait-s", "1")
    alone = cluster.router("r-alone", "--router.allow-local-prefill", "true")
    decode = cluster.worker("decode", "d-alone", *FAKE, routers=(waits, alone))
    for single in (waits, alone, decode):
        single.start()
    async with AsyncClient(waits.address) as client:
        await at_rest(client, ["d-alone"], heartbeat_s=HEARTBEAT_S)
        with pytest.raises(NoWorker, match="prefill"):
            await client.generate_text((1, 2, 3))
    async with AsyncClient(alone.address) as client:
        finished = await ask(client, Question.draw(Random("alone"), 300, 50))
        assert (finished.prefill_worker, finished.decode_worker) == ("", "d-alone")
    for single in (decode, alone, waits):
        assert await asyncio.to_thread(single.terminate) == 0
        del cluster.all[single.id]


# --- row 22: a client that doesn't read


async def test_a_client_that_does_not_read_is_given_up_and_disturbs_nobody(
    cluster: Singles, client: AsyncClient
) -> None:
    """What it doesn't take fills the connection's buffers; then `client_stall_s` passes."""
    question = Question.draw(Random("row 22"), 100, 7_000)
    router = cluster.all["r0"]
    before = await router.metric("pdserve_requests_total", status="CANCELLED")

    async def is_given_up() -> bool:
        return await router.metric("pdserve_requests_total", status="CANCELLED") > before

    # Without the probes the connection's window stays small.
    options = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
    async with grpc.aio.insecure_channel(router.address, options=options) as channel:
        call = InferenceStub(channel).Generate(question.request.to_proto())
        await call.read()
        for seed in range(3):
            await ask(client, Question.draw(Random(seed), 100, 50))
        await until("it is given up", is_given_up)
        with pytest.raises(grpc.aio.AioRpcError) as told:
            while True:
                await call.read()
        assert told.value.code() is grpc.StatusCode.CANCELLED


# --- row 23: a worker drains


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_draining_worker_serves_what_it_has(cluster: Singles, client: AsyncClient, role: str) -> None:
    random = Random(role)
    size = (LONG_PROMPT, 10) if role == "prefill" else (100, 3_000)
    answers = [asyncio.create_task(ask(client, Question.draw(random, *size))) for _ in range(4)]
    workers = of_role(cluster, role)

    async def busy() -> Single | None:
        name = "pdserve_leases" if role == "prefill" else "pdserve_running_sequences"
        for worker in workers:
            if await worker.metric(name):
                return worker
        return None

    leaving = await until("one of them is busy", busy)
    leaving.send(signal.SIGTERM)
    for answer in answers:
        assert (await answer).num_attempts == 1
    assert await asyncio.to_thread(leaving.wait) == 0
    leaving.start()
