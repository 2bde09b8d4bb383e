"""What child processes cost: python -m benchmarks.children

Start, proofs of small structures, the next proof after a kill, and memory.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import quantiles

import uvloop
from prometheus_client import CollectorRegistry

from pdserve.children.children import Children
from pdserve.children.frames import RenderChat
from pdserve.children.render import render_chat
from pdserve.clock import SystemClock
from pdserve.structure import Structure
from pdserve.tokenizer import Tokenizer

NUM_ROUNDS = 200


async def measure() -> None:
    """Print a table."""
    clock = SystemClock()
    begun_s = clock.now_s()
    async with (
        asyncio.TaskGroup() as tasks,
        Children(
            CollectorRegistry(), tasks.create_task, clock, os.environ, memory_bytes=256 << 20
        ) as children,
    ):
        server, prover, renderer = children.server, children.prover(2.0), children.renderer(5.0)
        await prover.prove(Structure.regex("first"), "")
        print(f"start, and the first proof: {(clock.now_s() - begun_s) * 1000:.0f} ms")
        number = 0

        async def prove() -> None:
            nonlocal number
            number += 1
            await prover.prove(Structure.regex(f"[a-c]{{{number}}}"), "")

        async def prove_after_kill() -> None:
            for pid in _children_of(server.pid):
                os.kill(pid, signal.SIGKILL)
            await prove()

        await _rounds("a proof of a regex", prove, clock)
        await _rounds("the same, all children just killed", prove_after_kill, clock)
        for num_messages in (1, 20, 2000):
            chat = {"messages": [{"role": "user", "content": "How are you today? " * 5}] * num_messages}
            template = Tokenizer.fake().chat_templates["default"]
            job = RenderChat(template, {}, json.dumps(chat))

            async def render(job: RenderChat = job) -> None:
                await renderer.render(job, "")

            async def render_here(job: RenderChat = job) -> None:
                render_chat(job)

            await _rounds(f"a chat of {num_messages}, in a child", render, clock)
            await _rounds(f"a chat of {num_messages}, here", render_here, clock)
        await prove()
        for name, pid in (("fork server", server.pid), *(("child", pid) for pid in _children_of(server.pid))):
            print(f"{name}: {_kib(pid, 'Rss:') >> 10} MiB, {_kib(pid, 'Pss:') >> 10} of its own share")


async def _rounds(name: str, call: Callable[[], Awaitable[None]], clock: SystemClock) -> None:
    took_ms = []
    for _ in range(NUM_ROUNDS):
        begun_s = clock.now_s()
        await call()
        took_ms.append((clock.now_s() - begun_s) * 1000)
    cuts = quantiles(took_ms, n=100)
    print(f"{name}: p50 {cuts[49]:.2f} ms, p90 {cuts[89]:.2f}, p99 {cuts[98]:.2f}, n {NUM_ROUNDS}")


def _children_of(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _kib(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(measure())
