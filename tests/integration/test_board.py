"""A real Prometheus scrapes a cluster at work: no panel of the board is empty, no rule is broken, none fires."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from random import Random
from typing import Any

from deploy.local.probe import fetch
from pdserve.client import AsyncClient
from tests.support.asking import Question, ask, at_rest
from tests.support.http_calls import call
from tests.support.prometheus import BOARD, JOB, Prometheus, alerts, program, promtool, running_prometheus
from tests.support.singles import Singles
from tests.support.waiting import until
from tools.grafana_board import text

FAKE = ("--engine", "fake", "--engine.num-blocks", "512")
SCRAPE_MS, WINDOW = 200, "2s"


def queries() -> dict[str, str]:
    """Of every panel, as Grafana would fill in its variables."""
    panels: list[dict[str, Any]] = [
        each for each in json.loads(BOARD.read_text())["panels"] if "targets" in each
    ]
    return {
        f"{panel['title']}: {target['legendFormat']}": target["expr"]
        .replace("$job", JOB)
        .replace("$__rate_interval", WINDOW)
        for panel in panels
        for target in panel["targets"]
    }


def test_the_board_is_what_its_tool_writes() -> None:
    assert BOARD.read_text() == text(), "run: python tools/grafana_board.py"


async def test_every_panel_shows_something_and_no_alert_is_wrong(tmp_path: Path) -> None:
    program("promtool")
    wanted = queries()
    assert len(wanted) > 50
    with Singles(tmp_path) as cluster:
        at = cluster.reserve()
        router = cluster.router("r0", "--http-listen", at)
        for role, name in (("prefill", "p0"), ("decode", "d0")):
            cluster.worker(role, name, *FAKE)
        cluster.start()
        targets = [single.metrics for single in cluster.all.values()]
        with running_prometheus(tmp_path, targets, SCRAPE_MS) as prometheus:
            async with AsyncClient(router.address) as client:
                await at_rest(client, ["d0", "p0"])
                asking = asyncio.create_task(keep_asking(client, at))
                try:
                    empty = dict(wanted)

                    async def all_shown() -> bool:
                        for name, query in list(empty.items()):
                            if any(math.isfinite(value) for _, value in await prometheus.query(query)):
                                del empty[name]
                        return not empty

                    await until("every panel shows something", all_shown, told=lambda: "\n".join(empty))
                    await until("all rules were evaluated", lambda: all_evaluated(prometheus))
                finally:
                    asking.cancel()
                rules = await prometheus.rules()
                for single in cluster.all.values():
                    answer = await fetch(single.metrics, "/metrics")
                    assert answer is not None
                    done = promtool("check", "metrics", said=answer[1])
                    assert (done.returncode, done.stdout + done.stderr) == (0, ""), single.id
    assert [rule["name"] for rule in rules] == [alert["alert"] for alert in alerts()]
    assert {(rule["health"], rule.get("lastError", "")) for rule in rules} == {("ok", "")}
    assert {rule["name"] for rule in rules if rule["state"] == "firing"} == set()


async def all_evaluated(prometheus: Prometheus) -> bool:
    """At least once each."""
    rules = await prometheus.rules()
    return bool(rules) and all(rule["health"] != "unknown" for rule in rules)


async def keep_asking(client: AsyncClient, http: str) -> None:
    """One request behind the other, their prompts beginning alike, and one by HTTP, until it is cancelled."""
    random = Random(1)
    shared = Question.draw(random, 160, 1).prompt_ids
    while True:
        drawn = Question.draw(random, 40, 20)
        await ask(client, Question(prompt_ids=shared + drawn.prompt_ids, max_tokens=20, seed=drawn.seed))
        assert (await call(http, "/v1/completions", {"prompt": "hello", "max_tokens": 3})).status == 200
