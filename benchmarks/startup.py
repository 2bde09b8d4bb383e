"""How long a start and an end take, as a user waits for them: seconds by the clock on the wall, and of the processors.

    python -m benchmarks.startup [--rounds 5] [--model smollm2-135m]

router      `pdserve router`: started → listening
up          `pdserve up` of one prefill and one decode worker with a model that is fetched: started → ready line
first token → the first token of a prompt of a few words, sent when the ready line has come
drained     SIGTERM → all processes have ended, nothing in hand

Processor seconds of `up` are those of all its processes until they have ended. On a machine that does other things at
the same time they say more than the wall's.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import signal
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from deploy.command import PROGRAM, environ_of
from deploy.demo.cluster import running_cluster
from pdserve.client import AsyncClient
from pdserve.clock import SystemClock
from pdserve.request import GenerateRequest, Tokens
from pdserve.sampling import SamplingParams
from pdserve.service.config import EngineConfig

CLOCK = SystemClock()
LIMIT_S = 120.0


class Times:
    """Seconds by what was timed, in the order in which they were first given."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = {}

    def add(self, what: str, seconds: float) -> None:
        self._seconds.setdefault(what, []).append(seconds)

    def lines(self) -> list[str]:
        """A table: median, smallest and largest, n."""
        lines = [f"{'what':56} {'median s':>9} {'min':>7} {'max':>7} {'n':>3}"]
        for what, each in self._seconds.items():
            lines.append(
                f"{what:56} {statistics.median(each):9.2f} {min(each):7.2f} {max(each):7.2f} {len(each):3}"
            )
        return lines


async def time_router(times: Times) -> None:
    """One start and one end of a router."""
    started_s = CLOCK.now_s()
    process = await asyncio.create_subprocess_exec(
        *(*PROGRAM, "router", "--listen", "127.0.0.1:0", "--log.format", "json"),
        stdin=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env=environ_of("router", EngineConfig(), os.environ),
    )
    assert process.stderr is not None
    async with asyncio.timeout(LIMIT_S):
        while b'"router.listening"' not in (line := await process.stderr.readline()):
            if not line:
                raise SystemExit("the router did not start")
        listening_s = CLOCK.now_s()
        times.add("router: listening", listening_s - started_s)
        process.send_signal(signal.SIGTERM)
        await process.stderr.read()
        await process.wait()
    times.add("router: drained", CLOCK.now_s() - listening_s)


async def time_up(times: Times, arguments: Sequence[str], prompt: str) -> None:
    """One cluster, from its start over its first token to its end."""
    request = GenerateRequest(input=prompt, sampling=SamplingParams(temperature=0.0, max_tokens=4))
    with tempfile.TemporaryDirectory(prefix="pdserve-startup-") as folder:
        started_s, busy_s = CLOCK.now_s(), processor_s()
        async with asyncio.timeout(LIMIT_S):
            async with running_cluster(Path(folder), arguments) as cluster:
                ready_s = CLOCK.now_s()
                times.add("up: ready", ready_s - started_s)
                async with AsyncClient(cluster.target) as client:
                    async for event in client.generate(request):
                        if isinstance(event, Tokens) and event.first_index == 0:
                            times.add("up: first token", CLOCK.now_s() - started_s)
                ends_s = CLOCK.now_s()
            times.add("up: drained", CLOCK.now_s() - ends_s)
            times.add("up: processor seconds, all of it", processor_s() - busy_s)


def processor_s() -> float:
    """Of all child processes that have ended, and theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


async def run(rounds: int, model: str) -> Times:
    times = Times()
    for number in range(rounds + 1):
        kept = times if number else Times()  # the first round reads files from the disk
        before_s = processor_s()
        await time_router(kept)
        kept.add("router: processor seconds", processor_s() - before_s)
        await time_up(kept, ("--model", model), "The capital of France is")
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="after one that doesn't count")
    parser.add_argument("--model", default="smollm2-135m")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    times = asyncio.run(run(arguments.rounds, arguments.model))
    print(
        f"{arguments.model}, {os.cpu_count()} cores, load {load:.1f} before, {os.getloadavg()[0]:.1f} after"
    )
    print("\n".join(times.lines()))


if __name__ == "__main__":
    main()
