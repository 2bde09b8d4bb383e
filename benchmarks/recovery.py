"""How long a client waits when something breaks, and how long until all is as before.

    python -m benchmarks.recovery [--rounds 5]

The fake engine on two prefill and two decode workers: real processes, default time-outs, one request at a time.
first token: how long the client waits for it. longest gap: between two tokens of its stream. back: killed → the
supervisor has rewritten the ready file, mostly the start of a Python process. With a real model a new attempt takes
the prefill of prompt and tokens so far besides, and a restart the model's loading.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from random import Random
from typing import TypeVar

from benchmarks.startup import CLOCK, Times
from deploy.demo.cluster import running_cluster
from pdserve.client import AsyncClient
from pdserve.request import GenerateRequest, Tokens
from pdserve.sampling import SamplingParams

T = TypeVar("T")

ARGUMENTS = (
    *("--engine", "fake", "--prefill", "2", "--decode", "2", "--engine.num-blocks", "1024"),
    *("--engine.max-step-tokens", "4"),
)
PROMPT_TOKENS, NEW_TOKENS = 7_000, 1_000
LIMIT_S = 60.0
CASES = (
    ("decode", "streaming", signal.SIGKILL, "killed"),
    ("prefill", "prefilling", signal.SIGKILL, "killed"),
    ("prefill", "streaming", signal.SIGKILL, "killed"),
    ("decode", "streaming", signal.SIGSTOP, "stopped"),
    ("prefill", "prefilling", signal.SIGSTOP, "stopped"),
)


class Stream:
    """One request, and when its tokens came."""

    def __init__(self, client: AsyncClient, random: Random) -> None:
        prompt = tuple(random.choices(range(1, 250), k=PROMPT_TOKENS))
        self._request = GenerateRequest(input=prompt, sampling=SamplingParams(max_tokens=NEW_TOKENS))
        self._client = client
        self._came_s: list[float] = []
        self.streaming = asyncio.Event()

    async def read(self) -> None:
        """To its end."""
        self._came_s.append(CLOCK.now_s())
        async with aclosing(self._client.generate(self._request, deadline_s=LIMIT_S)) as events:
            async for event in events:
                if isinstance(event, Tokens):
                    self._came_s += [CLOCK.now_s()] * len(event.token_ids)
                    if len(self._came_s) > 20:
                        self.streaming.set()

    @property
    def pause_s(self) -> float:
        """The longest wait between two tokens."""
        return max(later - earlier for earlier, later in zip(self._came_s[1:], self._came_s[2:]))

    @property
    def first_s(self) -> float:
        """The wait for the first one."""
        return self._came_s[1] - self._came_s[0]


class Breaker:
    """Breaks one thing after another in one cluster, and waits each time until all is well again."""

    def __init__(self, folder: Path, client: AsyncClient, random: Random) -> None:
        self._ready_file = folder / "ready.json"
        self._client = client
        self._random = random

    async def undisturbed(self, times: Times) -> None:
        """What the others are to be compared with."""
        stream = Stream(self._client, self._random)
        await stream.read()
        times.add("nothing breaks: first token", stream.first_s)
        times.add("nothing breaks: longest gap", stream.pause_s)

    async def hit(self, times: Times, role: str, phase: str, number: signal.Signals, how: str) -> None:
        """One case."""
        await until(self._all_are_up)
        stream = Stream(self._client, self._random)
        reading = asyncio.create_task(stream.read())
        if phase == "streaming":
            await stream.streaming.wait()
        worker = await until(lambda: self._busy("decode" if phase == "streaming" else "prefill"))
        worker = worker if worker.startswith(role) else f"{role}-0"
        pid = self._pids()[worker]
        os.kill(pid, number)
        hit_s = CLOCK.now_s()
        await reading
        what = f"{role} worker {how}, {phase}"
        if phase == "streaming":
            times.add(f"{what}: longest gap", stream.pause_s)
        else:
            times.add(f"{what}: first token", stream.first_s)
        if number is signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)
            return
        await until(lambda: self._is_new(worker, pid))
        times.add(f"{what}: back", CLOCK.now_s() - hit_s)

    def _pids(self) -> dict[str, int]:
        rows = json.loads(self._ready_file.read_text())["processes"]
        return {row["id"]: int(row["pid"]) for row in rows}

    async def _is_new(self, worker: str, pid: int) -> bool:
        return self._pids().get(worker, pid) != pid

    async def _busy(self, role: str) -> str | None:
        status = await self._client.status()
        busy = [each.id for each in status.workers if each.role == role and each.num_running]
        return busy[0] if busy else None

    async def _all_are_up(self) -> bool:
        return sum(pair.up for pair in (await self._client.status()).pairs) == 4


async def until(ask: Callable[[], Awaitable[T | None]]) -> T:
    """Ask until the answer is neither None nor False."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            answer = await ask()
            if answer:
                return answer
            await asyncio.sleep(0.01)


async def run(rounds: int) -> Times:
    times = Times()
    with tempfile.TemporaryDirectory(prefix="pdserve-recovery-") as name:
        folder = Path(name)
        async with running_cluster(folder, ARGUMENTS) as cluster, AsyncClient(cluster.target) as client:
            breaker = Breaker(folder, client, Random(1))
            for _ in range(rounds):
                await breaker.undisturbed(times)
                for case in CASES:
                    await breaker.hit(times, *case)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    times = asyncio.run(run(arguments.rounds))
    print(f"fake engine, {os.cpu_count()} cores, load {load:.1f} before, {os.getloadavg()[0]:.1f} after")
    print("\n".join(times.lines()))


if __name__ == "__main__":
    main()
