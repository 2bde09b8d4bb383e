"""What HTTP costs beside gRPC: processor time of the router, and of a gateway, a token; and gaps as clients see them.

    python -m benchmarks.http_door [--streams 64] [--tokens 200] [--rate 20] [--core N]

grpc      the router's processor time a token, clients by gRPC, a call for each stream
shared    the same, all streams over one call, as a gateway asks
http      the same, clients by HTTP at the router
gateway   that of a gateway in front of it
start     `pdserve router --http-listen`: started → listening

Streams run on a fake engine that makes each its tokens at the rate; "late" is how much later than that a token came.
The last lines say which aims were met, by the medians of all rounds: run it with --core on a machine that does nothing
else.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import statistics
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from deploy.command import PROGRAM
from deploy.demo.cluster import running_cluster
from pdserve.client import AsyncClient
from pdserve.clock import SystemClock
from pdserve.request import GenerateRequest, Tokens
from pdserve.sampling import SamplingParams
from pdserve.service.address import split_address

CLOCK = SystemClock()
START_S, HTTP_OF_GRPC, GATEWAY_US, SHARED_US, LATE_MS = 1.8, 1.3, 60.0, 100.0, 50.0  # the aims
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_HTTP = re.compile(r"http=(\S+)")


def cpu_s(pid: int) -> float:
    """Processor seconds of a process so far, all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


Stream = Callable[[int], Awaitable[list[float]]]
"""One stream of so many tokens: when each came."""


def http_stream(address: str) -> Stream:
    """Over a plain socket, so that the client costs little."""
    host, port = split_address(address.removeprefix("http://"))

    async def run(num_tokens: int) -> list[float]:
        reader, writer = await asyncio.open_connection(host, port)
        body = f'{{"prompt": "hello", "max_tokens": {num_tokens}, "ignore_eos": true, "stream": true}}'
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write((head + body).encode())
        came: list[float] = []
        status = await reader.readline()
        async for line in reader:
            if line.startswith(b"data: {") and b'"finish_reason":null' in line:
                came.append(CLOCK.now_s())
            if line.startswith(b"data: [DONE]"):
                writer.close()
                return came
        raise SystemExit(f"a stream wasn't whole: {status.decode().strip()}")

    return run


def grpc_stream(client: AsyncClient) -> Stream:
    async def run(num_tokens: int) -> list[float]:
        sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        request = GenerateRequest(input="hello", sampling=sampling)
        return [CLOCK.now_s() async for event in client.generate(request) if isinstance(event, Tokens)]

    return run


@dataclass(frozen=True, slots=True)
class Measured:
    """cost_us: of the process, a token; late_ms: the latest token's."""

    cost_us: float
    late_ms: float


async def measure(
    name: str, stream: Stream, pid: int, num_streams: int, num_tokens: int, rate: float
) -> Measured:
    """Print a line."""
    await stream(8)  # whatever is made once
    before_s = cpu_s(pid)
    came = await asyncio.gather(*(stream(num_tokens) for _ in range(num_streams)))
    cost_us = (cpu_s(pid) - before_s) / (num_streams * num_tokens) * 1e6
    late_ms = sorted(
        (later - sooner - 1 / rate) * 1000 for each in came for sooner, later in pairwise(each[1:])
    )
    parts = [late_ms[int(share * (len(late_ms) - 1))] for share in (0.5, 0.99, 0.999, 1.0)]
    shown = " ".join(f"{name_} {part:6.1f}" for name_, part in zip(("p50", "p99", "p99.9", "max"), parts))
    print(f"{name:8} {cost_us:6.1f} µs a token   late by, ms: {shown}   n {len(late_ms)}", flush=True)
    return Measured(cost_us, late_ms[-1])


def tell_aims(start_s: float, rounds: Sequence[tuple[Measured, Measured, Measured, Measured]]) -> None:
    """rounds: by gRPC, over one call, by HTTP, through a gateway."""
    ratio = statistics.median(http.cost_us / grpc.cost_us for grpc, _, http, _ in rounds)
    shared_us = statistics.median(shared.cost_us for _, shared, _, _ in rounds)
    gateway_us = statistics.median(gateway.cost_us for *_, gateway in rounds)
    late_ms = statistics.median(max(each.late_ms for each in measured[2:]) for measured in rounds)
    for what, found, aim in (
        ("start, s", start_s, START_S),
        ("http / grpc", ratio, HTTP_OF_GRPC),
        ("gateway, µs a token", gateway_us, GATEWAY_US),
        ("router by one call, µs", shared_us, SHARED_US),
        ("latest token by HTTP, ms", late_ms, LATE_MS),
    ):
        print(f"{what:26} {found:7.2f}   aim {aim:5.1f}   {'met' if found <= aim else 'missed'}")


async def started(arguments: Sequence[str]) -> tuple[asyncio.subprocess.Process, str, float]:
    """A process of ours that listens for HTTP: itself, where, and after how many seconds."""
    began_s = CLOCK.now_s()
    child = await asyncio.create_subprocess_exec(
        *PROGRAM, *arguments, stderr=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL
    )
    assert child.stderr is not None
    while line := (await child.stderr.readline()).decode():
        if ".listening" in line and (found := _HTTP.search(line)):
            return child, found[1], CLOCK.now_s() - began_s
    raise RuntimeError(f"{arguments} did not listen")


async def stop(child: asyncio.subprocess.Process) -> None:
    child.terminate()
    assert child.stderr is not None
    await child.stderr.read()
    await child.wait()


async def run(arguments: argparse.Namespace) -> None:
    seconds = []
    for _ in range(arguments.rounds):
        child, _, took_s = await started(
            (
                "router",
                "--listen",
                "127.0.0.1:0",
                "--workers-listen",
                "127.0.0.1:0",
                "--http-listen",
                "127.0.0.1:0",
            )
        )
        seconds.append(took_s)
        await stop(child)
    start_s = statistics.median(seconds)
    print(f"start    {start_s:.2f} s (of {sorted(round(each, 2) for each in seconds)})")
    engine = ("--engine", "fake", "--engine.fake-step-s", str(1 / arguments.rate))
    settings = (*engine, "--engine.num-blocks", "8192", "--engine.max-batch", str(arguments.streams))
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pdserve-http-")))
        cluster = await stack.enter_async_context(running_cluster(folder, settings))
        gateway, address, _ = await started(
            ("gateway", "--target", cluster.target, "--listen", "127.0.0.1:0")
        )
        stack.push_async_callback(stop, gateway)
        router = cluster.pid("router")
        if arguments.core is not None:
            for pid in (router, gateway.pid):
                os.sched_setaffinity(pid, {arguments.core})
        client = await stack.enter_async_context(AsyncClient(cluster.target))
        sharing = await stack.enter_async_context(AsyncClient(cluster.target, shares_calls=True))
        how = (arguments.streams, arguments.tokens, arguments.rate)
        rounds = [
            (
                await measure("grpc", grpc_stream(client), router, *how),
                await measure("shared", grpc_stream(sharing), router, *how),
                await measure("http", http_stream(cluster.http), router, *how),
                await measure("gateway", http_stream(address), gateway.pid, *how),
            )
            for _ in range(arguments.rounds)
        ]
    tell_aims(start_s, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rate", type=float, default=20.0, help="tokens a second of each stream")
    parser.add_argument("--core", type=int, help="keep router and gateway on this one")
    parser.add_argument("--rounds", type=int, default=3)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
