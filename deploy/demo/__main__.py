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

from deploy.demo.cluster import DemoCluster, running_cluster
from deploy.demo.prompts import DemoPrompt, demo_prompts
from deploy.demo.table import table_of
from deploy.demo.view import View, view_on
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
        async with running_cluster(Path(scratch), up) as cluster:
            console.print(f"{cluster.ready_line}\n", highlight=False, soft_wrap=True)
            if cluster.http:
                console.print(f"{_curl(cluster.http)}\n", highlight=False, soft_wrap=True, markup=False)
            started_s = clock.now_s()
            with view_on(console, prompts) as view:
                finished = await _Streams(cluster, view, arguments).run(prompts)
            took_s = clock.now_s() - started_s
            console.print("", table_of(finished), sep="\n")
    num_tokens = sum(each.usage.num_completion_tokens for each in finished.values())
    console.print(f"\n{num_tokens} tokens on three streams in {took_s:.1f} s.", highlight=False)
    if arguments.kill is None:
        console.print(
            'Kill the decode worker in mid-sentence: make demo DEMO_ARGS="--kill decode"', highlight=False
        )
    return 0


def _curl(http: str) -> str:
    """The line by which anybody else asks the same cluster, while it runs."""
    asked = '{"messages": [{"role": "user", "content": "Why is the sky blue?"}]}'
    return f"curl {http}/v1/chat/completions -d '{asked}'"


def _fetched(model: str) -> bool:
    """Fetch a known model; everything else is a path, which `pdserve up` looks at."""
    if model != _MODEL:
        return True
    command = [sys.executable, "-P", "-m", "pdserve.cli", "fetch", model]
    return subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode == 0


class _Streams:
    """All prompts at once; the chosen worker is killed once, in the middle of the first stream."""

    def __init__(self, cluster: DemoCluster, view: View, arguments: argparse.Namespace) -> None:
        self._cluster = cluster
        self._view = view
        self._max_tokens: int = arguments.tokens
        self._role_to_kill: str | None = arguments.kill

    async def run(self, prompts: Sequence[DemoPrompt]) -> dict[str, Finished]:
        """The streams' last messages by label."""
        async with AsyncClient(self._cluster.target) as client, asyncio.TaskGroup() as group:
            tasks = {each.label: group.create_task(self._stream(client, each)) for each in prompts}
        return {label: task.result() for label, task in tasks.items()}

    async def _stream(self, client: AsyncClient, prompt: DemoPrompt) -> Finished:
        sampling = SamplingParams(temperature=0.5, max_tokens=self._max_tokens)
        request = GenerateRequest(input=prompt.input, sampling=sampling, seed=_SEED)
        num_tokens = 0
        async for event in client.generate(request):
            if isinstance(event, Tokens):
                self._view.add(prompt.label, event.text)
                num_tokens += len(event.token_ids)
                if self._role_to_kill is not None and num_tokens >= _TOKENS_BEFORE_KILL:
                    role, self._role_to_kill = self._role_to_kill, None
                    pid = self._cluster.kill(role)
                    self._view.add(prompt.label, f" [kill -9 {pid}: {role} worker] ")
            elif isinstance(event, Finished):
                note = f"{event.usage.num_completion_tokens} tokens, {event.reason.value}"
                self._view.end(prompt.label, note)
                return event
        raise PdserveError("a stream ended without a last message", stream=prompt.label)


if __name__ == "__main__":
    sys.exit(main())
