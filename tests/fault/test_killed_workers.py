"""Kill -9 of a worker under a running request, in a cluster that `pdserve up` keeps: the client's stream goes on and
ends with the text of an undisturbed run, and the supervisor has the worker back (failures.md, rows 3 to 5 and 7).

On the fake engine, and on the packaged model in `deterministic` mode.
"""

from __future__ import annotations

import asyncio
import dataclasses
import signal
from collections.abc import Callable, Iterator
from contextlib import aclosing

import pytest

from deploy.local.probe import fetch
from pdserve.client import AsyncClient
from pdserve.clock import SystemClock
from pdserve.request import Finished, GenerateRequest, Tokens
from pdserve.sampling import SamplingParams
from tests.support.asking import at_rest
from tests.support.processes import LocalCluster, ProcessRow, run_cli, sum_samples
from tests.support.waiting import until

HEARTBEAT_S = 0.1
BACK_LIMIT_S = 90.0
COMMON = ("--timeouts.heartbeat-s", f"{HEARTBEAT_S}", "--prefill", "1", "--decode", "1")
FAKE = ("--engine", "fake", "--engine.num-blocks", "1024", "--engine.max-step-tokens", "2")
PACKAGED = ("--model", "smollm2-135m", "--deterministic", "--engine.max-step-tokens", "32")
PACKAGED_MEMORY = ("--engine.kv-memory-bytes", f"{256 << 20}")
WORKERS = ("prefill-0", "decode-0")

# A prefill worker that dies after the hand-off is missed by nobody.
CASES = [("decode", "streaming", 2), ("prefill", "prefilling", 2), ("prefill", "streaming", 1)]


@dataclasses.dataclass(frozen=True)
class Served:
    """A cluster, and a request whose prefill and decode last long enough to be hit."""

    cluster: LocalCluster
    request: GenerateRequest
    streaming_at: int  # tokens that the client has when a kill in mid-stream comes


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with LocalCluster(tmp_path_factory.mktemp("fake"), *COMMON, *FAKE) as cluster:
        yield Served(cluster, asking("Once upon a time, " * 400, 900), 20)


@pytest.fixture(scope="module")
def packaged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    assert run_cli("fetch", "smollm2-135m", limit_s=300).returncode == 0
    with LocalCluster(tmp_path_factory.mktemp("packaged"), *COMMON, *PACKAGED, *PACKAGED_MEMORY) as cluster:
        yield Served(cluster, asking("The river ran past the mill and " * 40, 24), 4)


def asking(prompt: str, max_tokens: int) -> GenerateRequest:
    params = SamplingParams(temperature=0.8, max_tokens=max_tokens, ignore_eos=True)
    return GenerateRequest(input=prompt, seed=7, sampling=params)


@pytest.mark.parametrize(("role", "phase", "attempts"), CASES)
async def test_the_stream_goes_on(fake: Served, role: str, phase: str, attempts: int) -> None:
    await kill_under_a_request(fake, role, phase, attempts)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("role", "phase", "attempts"),
    [*CASES[:2], pytest.param(*CASES[2], marks=pytest.mark.slow)],
)
async def test_the_packaged_models_stream_goes_on(
    packaged: Served, role: str, phase: str, attempts: int
) -> None:
    await kill_under_a_request(packaged, role, phase, attempts)


async def kill_under_a_request(served: Served, role: str, phase: str, attempts: int) -> None:
    cluster, victim, clock = served.cluster, served.cluster.row(role), SystemClock()
    killed_s: float | None = None

    def kill() -> None:
        nonlocal killed_s
        if killed_s is None:
            cluster.signal(victim, signal.SIGKILL)
            killed_s = clock.now_s()

    async with AsyncClient(cluster.target) as client:
        # A salt of its own for each: nothing that one has computed is a cache hit of another.
        twin = dataclasses.replace(served.request, cache_salt=f"{role} {phase} undisturbed")
        expected, undisturbed = await read(client, twin)
        assert undisturbed.num_attempts == 1
        await at_rest(client, WORKERS, heartbeat_s=HEARTBEAT_S)
        decode = cluster.row("decode")
        before = await received_bytes(decode)
        when = (served.streaming_at, kill) if phase == "streaming" else None
        request = dataclasses.replace(served.request, cache_salt=f"{role} {phase}")
        stream = asyncio.create_task(read(client, request, when))
        if phase == "prefilling":
            await until("blocks of the first chunks have left", lambda: has_received_more(decode, before))
            kill()
        text, finished = await stream
        assert killed_s is not None
        ended_s = clock.now_s() - killed_s
        assert text == expected
        assert finished.num_attempts == attempts
        await asyncio.to_thread(
            cluster.wait_line, lambda line: line.startswith(f"{victim.id} is back"), BACK_LIMIT_S
        )
        print(
            f"{role} {phase}: text whole {ended_s:.2f} s, worker back {clock.now_s() - killed_s:.2f} s later"
        )
        assert cluster.row(role).pid != victim.pid
        status = await at_rest(client, WORKERS, heartbeat_s=HEARTBEAT_S)
        assert [pair.up for pair in status.pairs] == [True]


async def read(
    client: AsyncClient, request: GenerateRequest, when: tuple[int, Callable[[], None]] | None = None
) -> tuple[str, Finished]:
    """The whole text; `when` so many tokens have come, something is done."""
    text, num_tokens = "", 0
    finished: Finished | None = None
    async with aclosing(client.generate(request, deadline_s=200)) as events:
        async for event in events:
            match event:
                case Tokens():
                    text += event.text
                    num_tokens += len(event.token_ids)
                    if when is not None and num_tokens >= when[0]:
                        when[1]()
                case Finished():
                    finished = event
    assert finished is not None
    assert num_tokens == request.sampling.max_tokens
    return text, finished


async def received_bytes(row: ProcessRow) -> float:
    answer = await fetch(row.metrics, "/metrics")
    assert answer is not None
    return sum_samples(answer[1], "pdserve_kv_transfer_bytes_total", {"direction": "received"})


async def has_received_more(row: ProcessRow, before: float) -> bool:
    return await received_bytes(row) > before
