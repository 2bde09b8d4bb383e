"""What clients get of a cluster on this machine, beside the engine alone and beside vLLM, in turns.

    python -m benchmarks.serving [--rounds 3] [--part streams|ttft|interference …] [--side NAME="FLAGS" …]

streams       1, 8 and 32 streams at once, a prompt of 128 tokens and 64 new ones each: tokens a second over all of it,
              time a token, and processor time of each process a token
ttft          time to first token of prompts of 128, 512 and 2,048 tokens, and what of the KV's way was not hidden
interference  gaps of four streams alone, then with a prompt of 2,048 tokens every six seconds

Sides are clusters by `pdserve up` with their flags, and, before them, variables of their environment; without --side
one prefill and one decode worker, and one aggregated worker. The engine alone has as many threads as there are cores.
vLLM is left out if benchmarks.peers hasn't installed it. Ratios are to the first side of the table, round by round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from benchmarks.peers.__main__ import ENVIRONMENTS, python_of
from benchmarks.peers.vllm_server import running_vllm
from benchmarks.peers.widened import hugging_face
from benchmarks.turns import cpu_s, machine, ratio, spread, worker_environ
from deploy.demo.cluster import running_cluster
from pdserve import modelstore
from pdserve.bench.drive import Generates, LoadDriver, RequestRecord, Run
from pdserve.bench.plan import Planned, PlanOptions, make_plan
from pdserve.client import AsyncClient
from pdserve.clock import SystemClock
from pdserve.errors import WorkerLost
from pdserve.percentile import percentile
from pdserve.status import ModelInfo

CLOCK = SystemClock()
STREAMS, STREAM_PROMPT, STREAM_TOKENS = (1, 8, 32), 128, 64
PROMPTS, TTFT_TOKENS = (128, 512, 2048), 4
STEADY, STEADY_TOKENS = 4, 240
LONG_PROMPT, LONG_EVERY_S = 2048, 6.0
SIDES = ("1P+1D=--prefill 1 --decode 1", "both=--both 1")
VLLM_PORT = 18_047
PARTS = ("streams", "ttft", "interference")


@dataclass(frozen=True, slots=True)
class Told:
    """One cell of one side.

    cpu_ms      processor time a token, by process
    exposed_ms  of the KV's way, as the router tells it; None = nobody tells
    gaps_ms     of all streams
    """

    seconds: float
    num_tokens: int
    ttft_ms: float
    token_ms: float
    cpu_ms: dict[str, float] = field(default_factory=dict)
    exposed_ms: float | None = None
    gaps_ms: tuple[float, ...] = ()

    @property
    def rate(self) -> float:
        return self.num_tokens / self.seconds


class Side(Protocol):
    """What is measured."""

    async def run(self, streams: int, prompt: int, tokens: int, seed: int) -> Told:
        """So many requests at once."""
        ...


class EngineSide:
    """Scheduler, pool and runner in a process of their own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, stack: AsyncExitStack, model: str, threads: int) -> EngineSide:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.engine_alone", model, str(threads)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=worker_environ(),
            limit=1 << 24,
        )
        stack.push_async_callback(process.wait)
        stack.callback(process.kill)
        side = cls(process)
        await side._read()
        return side

    async def run(self, streams: int, prompt: int, tokens: int, seed: int) -> Told:
        asked = {"streams": streams, "prompt": prompt, "tokens": tokens, "seed": seed}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked).encode() + b"\n")
        told = await self._read()
        count = streams * tokens
        return Told(
            seconds=told["seconds"],
            num_tokens=count,
            ttft_ms=statistics.median(each[0] for each in told["token_s"]) * 1e3,
            token_ms=statistics.median((each[-1] - each[0]) / (tokens - 1) for each in told["token_s"]) * 1e3,
            cpu_ms={"engine": told["cpu_s"] / count * 1e3},
        )

    async def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            if line.startswith(b"{"):
                found: dict[str, Any] = json.loads(line)
                return found
        raise SystemExit("the engine has ended")


class ServerSide:
    """A server and its client, which is this process. pids: by name, whose processor time is told."""

    def __init__(self, client: Generates, model: ModelInfo, pids: Callable[[], dict[str, int]]) -> None:
        self._client = client
        self.model = model
        self._pids = pids

    async def run(self, streams: int, prompt: int, tokens: int, seed: int) -> Told:
        pids = self._pids() | {"client": os.getpid()}
        before_s = {name: cpu_s(pid) for name, pid in pids.items()}
        run = await self._drive(self._planned(streams, prompt, tokens, seed), streams)
        used_s = {name: cpu_s(pid) - before_s[name] for name, pid in pids.items()}
        return _told(run, {name: used / (streams * tokens) * 1e3 for name, used in used_s.items()})

    async def interfered(self, seed: int, *, disturbed: bool) -> Told:
        """Four streams, with or without long prompts between them."""
        steady = asyncio.ensure_future(
            self._drive(self._planned(STEADY, STREAM_PROMPT, STEADY_TOKENS, seed), STEADY)
        )
        if disturbed:
            number = 0
            while not (await asyncio.wait((steady,), timeout=LONG_EVERY_S if number else 1.0))[0]:
                number += 1
                long = self._planned(1, LONG_PROMPT, TTFT_TOKENS, seed * 1_000 + number)
                _told(await self._drive(long, 1), {})  # raises where it was refused
        return _told(await steady, {})

    def _planned(self, streams: int, prompt: int, tokens: int, seed: int) -> Sequence[Planned]:
        own_seed = ((seed * 10_000 + prompt) * 100 + streams) * 1_000 + tokens  # no cell hits another's cache
        options = PlanOptions(num_requests=streams, prompt_tokens=prompt, output_tokens=tokens, seed=own_seed)
        return make_plan(options, self.model).requests

    async def _drive(self, planned: Sequence[Planned], streams: int) -> Run:
        return await LoadDriver(self._client, CLOCK, concurrency=streams).run(planned, asyncio.Event())


def _told(run: Run, cpu_ms: dict[str, float]) -> Told:
    records: list[RequestRecord] = run.outcomes
    failed = [each.error for each in records if not each.is_ok]
    if failed:
        raise SystemExit(f"{len(failed)} requests failed: {failed[0]}")
    timings = [each.timings for each in records if each.timings is not None]
    return Told(
        seconds=run.seconds,
        num_tokens=sum(each.num_tokens for each in records),
        ttft_ms=statistics.median(each.ttft_s or 0.0 for each in records) * 1e3,
        token_ms=statistics.median(each.tpot_s or 0.0 for each in records) * 1e3,
        cpu_ms=cpu_ms,
        exposed_ms=statistics.median(each.transfer_exposed_ms for each in timings) if timings else None,
        gaps_ms=tuple(gap_s * 1e3 for each in records for gap_s in each.gaps_s),
    )


async def start_cluster(stack: AsyncExitStack, model: str, flags: str) -> ServerSide:
    """Words with = and without - before the first flag are variables of its environment."""
    words = flags.split()
    first = next((place for place, word in enumerate(words) if word.startswith("-")), len(words))
    variables = dict(word.split("=", 1) for word in words[:first])
    kept = dict(os.environ)
    os.environ.update(variables)
    try:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pdserve-serving-")))
        cluster = await stack.enter_async_context(running_cluster(folder, ("--model", model, *words[first:])))
    finally:
        for name in variables:
            os.environ.pop(name)
        os.environ.update(kept)
    client = await stack.enter_async_context(AsyncClient(cluster.target))
    return ServerSide(client, await client.model(), lambda: _pids(cluster.ready_file))


def _pids(ready_file: Path) -> dict[str, int]:
    rows = json.loads(ready_file.read_text())["processes"]
    return {row["id"]: int(row["pid"]) for row in rows}


async def start_vllm(stack: AsyncExitStack, model: str, info: ModelInfo) -> ServerSide | None:
    python = python_of("vllm")
    if not python.exists():
        print("# vllm: not installed (python -m benchmarks.peers --install vllm)", flush=True)
        return None
    weights = hugging_face(next(modelstore.resolve(model).glob("*.gguf")), ENVIRONMENTS / "models")
    cores, log = sorted(os.sched_getaffinity(0)), ENVIRONMENTS / "vllm-server.log"
    try:
        door, _ = await stack.enter_async_context(running_vllm(python, weights, VLLM_PORT, cores, log))
    except (WorkerLost, TimeoutError) as error:
        print(f"# vllm: left out, it didn't start: {error} ({log})", flush=True)
        return None
    return ServerSide(door, info, dict)


async def take_turns(
    sides: Sequence[str], rounds: int, cell: Callable[[str, int], Any]
) -> dict[str, list[Told]]:
    """By side, one of each round; the first round doesn't count."""
    told: dict[str, list[Told]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name in sides if number % 2 else sides[::-1]:
            found = await cell(name, number)
            if number:
                told[name].append(found)
    return told


def show(name: str, told: dict[str, list[Told]], value: Callable[[Told], float], unit: str) -> None:
    """A line for each side: the value, and its ratio to the first side's."""
    first = next(iter(told))
    for side, each in told.items():
        values = [value(one) for one in each]
        compared = "" if side == first else ratio(values, [value(one) for one in told[first]])
        print(f"{name:26}{side:16}{spread(values):>26} {unit:8}{compared:20} n {len(values)}", flush=True)


async def measure(options: argparse.Namespace) -> None:
    parts = options.part or PARTS
    async with AsyncExitStack() as stack:
        servers: dict[str, ServerSide] = {}
        for each in options.side or SIDES:
            name, _, flags = each.partition("=")
            servers[name] = await start_cluster(stack, options.model, flags)
            info = servers[name].model
        if not options.side and (vllm := await start_vllm(stack, options.model, info)) is not None:
            servers["vllm"] = vllm
        every: dict[str, Side] = dict(servers)
        if not options.no_engine and parts != ["interference"]:
            threads = len(os.sched_getaffinity(0))
            every = {"engine alone": await EngineSide.start(stack, options.model, threads), **servers}
        if "streams" in parts:
            for streams in options.streams or STREAMS:
                await _streams(every, streams, options.rounds)
        if "ttft" in parts:
            for prompt in PROMPTS:
                await _ttft(every, prompt, options.rounds)
        if "interference" in parts:
            await _interference(servers, options.rounds)


async def _streams(sides: dict[str, Side], streams: int, rounds: int) -> None:
    told = await take_turns(
        list(sides),
        rounds,
        lambda name, number: sides[name].run(streams, STREAM_PROMPT, STREAM_TOKENS, number),
    )
    show(f"{streams} streams", told, lambda one: one.rate, "tok/s")
    show(f"{streams} streams, a token", told, lambda one: one.token_ms, "ms")
    for side, each in told.items():
        used = {who: statistics.median(one.cpu_ms[who] for one in each) for who in each[0].cpu_ms}
        shown = "  ".join(f"{who} {value:.2f}" for who, value in used.items())
        print(f"{'':26}{side:16} processor ms a token: {shown}", flush=True)


async def _ttft(sides: dict[str, Side], prompt: int, rounds: int) -> None:
    told = await take_turns(
        list(sides), rounds, lambda name, number: sides[name].run(1, prompt, TTFT_TOKENS, number)
    )
    show(f"first token of {prompt:,}", told, lambda one: one.ttft_ms, "ms")
    shipped = {name: each for name, each in told.items() if each[0].exposed_ms}
    if shipped:
        show(f"of its KV exposed, {prompt:,}", shipped, lambda one: one.exposed_ms or 0.0, "ms")


async def _interference(sides: dict[str, ServerSide], rounds: int) -> None:
    alone = await take_turns(
        list(sides), rounds, lambda name, number: sides[name].interfered(number, disturbed=False)
    )
    disturbed = await take_turns(
        list(sides), rounds, lambda name, number: sides[name].interfered(number + 50, disturbed=True)
    )
    for side in sides:
        for what, told in (("alone", alone[side]), ("long prompts", disturbed[side])):
            gaps = sorted(gap for one in told for gap in one.gaps_ms)
            p50, p99, most = (percentile(gaps, percent) for percent in (50, 99, 100))
            rate = spread([one.rate for one in told])
            print(
                f"{side:16}{what:14} gaps p50 {p50:6.1f}  p99 {p99:7.1f}  max {most:7.1f} ms ({most / p50:4.1f} x p50)"
                f"   {rate} tok/s",
                flush=True,
            )
        print(
            f"{side:16}rate kept: {ratio([o.rate for o in disturbed[side]], [o.rate for o in alone[side]])}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m", help="alias of a fetched model")
    parser.add_argument("--rounds", type=int, default=3, help="after one that doesn't count")
    parser.add_argument("--part", action="append", choices=PARTS, help="default: all")
    parser.add_argument("--streams", action="append", type=int, help="numbers of streams (default 1, 8, 32)")
    parser.add_argument("--side", action="append", metavar='NAME="[VAR=VALUE …] FLAGS"', help="of pdserve up")
    parser.add_argument("--no-engine", action="store_true", help="leave out the engine alone")
    options = parser.parse_args()
    print(f"# {options.model}, {machine()}", flush=True)
    asyncio.run(measure(options))


if __name__ == "__main__":
    main()
