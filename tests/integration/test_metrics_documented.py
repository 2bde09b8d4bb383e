"""docs/operations.md lists every metric that routers, workers and gateways have, in their own words.

`python -m tests.integration.test_metrics_documented` rewrites the table from running processes.
"""

from __future__ import annotations

import asyncio
import re
import tempfile
from pathlib import Path

from deploy.local.probe import fetch
from pdserve.client import AsyncClient
from tests.support.asking import Question, ask, at_rest
from tests.support.singles import Singles

PAGE = Path(__file__).parents[2] / "docs/operations.md"
BEGIN, END = "| metric | on | what |\n|---|---|---|\n", "\n\n"
FAKE = ("--engine", "fake", "--engine.num-blocks", "256")
_HELP = re.compile(r"# HELP (pdserve_\w+) (.*)")
_MADE = "_created"  # when a counter began, which the library adds to each


async def table(folder: Path) -> str:
    """One row a metric, in alphabetical order."""
    found: dict[str, tuple[list[str], str]] = {}
    with Singles(folder) as cluster:
        router = cluster.router("r0", "--http-listen", "127.0.0.1:0")
        gateway = cluster.gateway("g0")
        workers = [cluster.worker(role, role, *FAKE) for role in ("prefill", "decode")]
        cluster.start()
        async with AsyncClient(router.address) as client:
            await at_rest(client, [worker.id for worker in workers])
            await ask(client, Question(prompt_ids=tuple(range(1, 60)), max_tokens=3, seed=1))
            await gateway.ready()
        all_kinds = (("router", router), *(("worker", worker) for worker in workers), ("gateway", gateway))
        for kind, single in all_kinds:
            answer = await fetch(single.metrics, "/metrics")
            assert answer is not None
            for name, text in _HELP.findall(answer[1]):
                kinds, _ = found.setdefault(name, ([], text))
                if kind not in kinds and not name.endswith(_MADE):
                    kinds.append(kind)
    rows = [
        f"| `{name}` | {', '.join(kinds)} | {text} |"
        for name, (kinds, text) in sorted(found.items())
        if kinds
    ]
    return "\n".join(rows)


async def test_the_page_lists_every_metric(tmp_path: Path) -> None:
    wanted = await table(tmp_path)
    page = PAGE.read_text()
    shown = page.partition(BEGIN)[2].partition(END)[0].rstrip("\n")
    missing = set(wanted.splitlines()) - set(shown.splitlines())
    gone = set(shown.splitlines()) - set(wanted.splitlines())
    assert not missing and not gone, f"missing: {missing}; gone or reworded: {gone}"


def _write() -> None:
    with tempfile.TemporaryDirectory() as folder:
        wanted = asyncio.run(table(Path(folder)))
    before, begin, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + begin + wanted + END + rest.partition(END)[2])


if __name__ == "__main__":
    _write()
