"""`python -m deploy.demo`, which is what `make demo` runs. Exit code 0 when every stream ended as it should."""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from deploy.demo.cluster import DemoCluster
from deploy.demo.prompts import DemoPrompt, demo_prompts
from deploy.demo.table import table_lines
from deploy.demo.view import View, print_table, view_for
from pdserve.client import AsyncClient
from pdserve.clock import SystemClock
from pdserve.errors import PdserveError, primary
from pdserve.request import GenerateRequest
from pdserve.response import Finished, Tokens
from pdserve.sampling import SamplingParams

_MODEL = "smollm2-135m"
# Enough of a sentence to be in the middle of it.
_TOKENS_BEFORE_KILL = 12
_SEED = 20


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo and return its exit code."""
    arguments = _parser().parse_args(argv)
    console = Console()
    try:
        return asyncio.run(_demo(arguments, console))
    except KeyboardInterrupt:
        return 130
    except PdserveError as error:
        sys.stderr.write(f"error: {error}\n")
    except BaseExceptionGroup as group:
        sys.stderr.write(f"error: {primary(group)}\n")
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make demo DEMO_ARGS=…", description=__doc__)
    parser.add_argument("--model", default=_MODEL, help=f"alias, folder or .gguf file (default {_MODEL})")
    parser.add_argument("--tokens", type=int, default=80, help="most tokens a stream (default 80)")
    parser.add_argument(
        "--kill",
        choices=("prefill", "decode"),
        help="kill -9 that worker in mid-sentence and watch the text go on",
    )
    return parser


async def _demo(arguments: argparse.Namespace, console: Console) -> int:
    clock = SystemClock()
    prompts = demo_prompts()
    if not _fetched(arguments.model):
        return 1
    with tempfile.TemporaryDirectory(prefix="pdserve-demo-") as scratch:
        console.print("Starting a router, a prefill worker and a decode worker …")
        up = ["--model", arguments.model, "--prefill", "1", "--decode", "1"]
        async with DemoCluster.running(Path(scratch), up) as cluster:
            console.print(f"{cluster.ready_line}\n", highlight=False, soft_wrap=True)
            started_s = clock.now_s()
            view = view_for(console, prompts)
            with view:
                finished = await _streams(cluster, prompts, view, arguments)
            took_s = clock.now_s() - started_s
            console.print()
            print_table(console, [prompt.label for prompt in prompts], table_lines(finished))
    num_tokens = sum(each.usage.num_completion_tokens for each in finished)
    console.print(f"\n{num_tokens} tokens on three streams in {took_s:.1f} s.", highlight=False)
    if arguments.kill is None:
        console.print(
            'Kill the decode worker in mid-sentence: make demo DEMO_ARGS="--kill decode"', highlight=False
        )
    return 0


def _fetched(model: str) -> bool:
    """Fetch a known model; everything else is a path, which `pdserve up` looks at."""
    if model != _MODEL:
        return True
    command = [sys.executable, "-P", "-m", "pdserve.cli", "fetch", model]
    return subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode == 0


async def _streams(
    cluster: DemoCluster, prompts: Sequence[DemoPrompt], view: View, arguments: argparse.Namespace
) -> list[Finished]:
    """All prompts at once; their last messages in the same order."""
    killer = _Killer(cluster, arguments.kill, view)
    async with AsyncClient(cluster.target) as client, asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(_stream(client, prompt, view, arguments.tokens, killer)) for prompt in prompts
        ]
    return [task.result() for task in tasks]


class _Killer:
    """Kills the chosen worker once, in the middle of the first stream."""

    def __init__(self, cluster: DemoCluster, role: str | None, view: View) -> None:
        self._cluster = cluster
        self._role = role
        self._view = view

    def saw(self, label: str, num_tokens: int) -> None:
        """A stream has so many tokens."""
        if self._role is None or num_tokens < _TOKENS_BEFORE_KILL:
            return
        role, self._role = self._role, None
        pid = self._cluster.kill(role)
        self._view.add(label, f" [kill -9 {pid}: {role} worker] ")


async def _stream(
    client: AsyncClient, prompt: DemoPrompt, view: View, max_tokens: int, killer: _Killer
) -> Finished:
    request = GenerateRequest(
        input=prompt.input, sampling=SamplingParams(temperature=0.5, max_tokens=max_tokens), seed=_SEED
    )
    num_tokens = 0
    async for event in client.generate(request):
        if isinstance(event, Tokens):
            view.add(prompt.label, event.text)
            num_tokens += len(event.token_ids)
            killer.saw(prompt.label, num_tokens)
        elif isinstance(event, Finished):
            view.end(prompt.label, f"{event.usage.num_completion_tokens} tokens, {event.reason.value}")
            return event
    raise PdserveError("a stream ended without a last message", stream=prompt.label)


if __name__ == "__main__":
    sys.exit(main())
