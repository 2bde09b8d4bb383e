"""Alerts by Prometheus's own promtool: each fires where it should, none where all is well, and each says what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.prometheus import JOB, RULES, alerts, promtool
from tests.support.readme import ROOT

ALERTS = {rule["alert"]: rule for rule in alerts()}
WHERE = f'job="{JOB}", instance="h:1"'
REQUESTS = "pdserve_requests_total{" + WHERE + ', status="%s"}'

# Alert → series, and the minute in which it must fire.
FIRES: dict[str, tuple[dict[str, str], int]] = {
    "PdserveDown": ({"up{" + WHERE + "}": "1 0x9"}, 3),
    "PdserveNotServing": ({"pdserve_serving{" + WHERE + "}": "1 0x9"}, 3),
    "PdserveRequestsFail": ({REQUESTS % "OK": "0+90x20", REQUESTS % "UNAVAILABLE": "0+10x20"}, 12),
    "PdserveOverloaded": ({REQUESTS % "OK": "0+90x20", REQUESTS % "RESOURCE_EXHAUSTED": "0+10x20"}, 12),
    "PdserveSlowFirstToken": (
        {
            "pdserve_ttft_seconds_bucket{" + WHERE + ', le="2.5"}': "0+8x40",
            "pdserve_ttft_seconds_bucket{" + WHERE + ', le="5.0"}': "0+10x40",
            "pdserve_ttft_seconds_bucket{" + WHERE + ', le="+Inf"}': "0+10x40",
        },
        25,
    ),
    "PdserveSlowTokens": (
        {
            "pdserve_itl_seconds_bucket{" + WHERE + ', le="0.25"}': "0+8x40",
            "pdserve_itl_seconds_bucket{" + WHERE + ', le="0.5"}': "0+10x40",
            "pdserve_itl_seconds_bucket{" + WHERE + ', le="+Inf"}': "0+10x40",
        },
        25,
    ),
    "PdserveAttemptsRepeated": (
        {
            "pdserve_attempts_total{" + WHERE + ', reason="ok"}': "0+90x40",
            "pdserve_attempts_total{" + WHERE + ', reason="WorkerLost"}': "0+10x40",
        },
        25,
    ),
    "PdserveWorkersLeave": ({"pdserve_workers_left_total{" + WHERE + "}": "0 1 2 3 4 5 6 7 8x9"}, 9),
    # The first of its kind: there was no such series before.
    "PdserveWorkerRefused": (
        {"pdserve_workers_refused_total{" + WHERE + ', reason="Incompatible"}': "_x3 1x9"},
        5,
    ),
    "PdserveWorkerAlone": ({"pdserve_routers_joined{" + WHERE + "}": "0x9"}, 6),
    "PdserveEngineStands": (
        {"pdserve_running_sequences{" + WHERE + "}": "3x9", "pdserve_steps_total{" + WHERE + "}": "7x9"},
        5,
    ),
    "PdservePoolFull": (
        {
            "pdserve_kv_blocks{" + WHERE + ', state="free"}': "2x30",
            "pdserve_kv_blocks{" + WHERE + ', state="cached"}': "0x30",
            "pdserve_kv_blocks{" + WHERE + ', state="owned"}': "98x30",
        },
        12,
    ),
    "PdservePreemptions": ({"pdserve_preemptions_total{" + WHERE + "}": "0+20x40"}, 25),
    "PdserveBlocksInQuarantine": ({"pdserve_quarantine_age_seconds{" + WHERE + "}": "0 61"}, 1),
    "PdserveKvCorrupt": ({"pdserve_kv_corrupt_total{" + WHERE + ', peer="p0"}': "_x3 3x9"}, 5),
    "PdserveLinksLost": ({"pdserve_links_lost_total{" + WHERE + "}": "0 1 2 3 4 5 6 7 8x9"}, 9),
    "PdserveBooksWrong": ({"pdserve_books_wrong_total{" + WHERE + ', book="grants"}': "_x3 1x9"}, 5),
    "PdserveSessionCrashes": ({"pdserve_session_crashes_total{" + WHERE + "}": "0 1x9"}, 3),
    "PdserveLoopHeld": (
        {
            "pdserve_loop_held_seconds_bucket{" + WHERE + ', le="0.1"}': "0+8x40",
            "pdserve_loop_held_seconds_bucket{" + WHERE + ', le="1.0"}': "0+10x40",
            "pdserve_loop_held_seconds_bucket{" + WHERE + ', le="+Inf"}': "0+10x40",
        },
        20,
    ),
    "PdserveChildrenKilled": ({"pdserve_child_kills_total{" + WHERE + ', reason="time"}': "_x3 6x9"}, 5),
    "PdserveTracesLost": ({"pdserve_spans_dropped_total{" + WHERE + ', reason="full"}': "0+5x60"}, 20),
}
# A cluster at work: what each metric of a rule shows, an hour long.
WELL = {
    "up{" + WHERE + "}": "1x60",
    "pdserve_serving{" + WHERE + "}": "1x60",
    REQUESTS % "OK": "0+1000x60",
    REQUESTS % "CANCELLED": "0+100x60",
    REQUESTS % "INVALID_ARGUMENT": "0+100x60",
    REQUESTS % "UNAVAILABLE": "0+1x60",
    REQUESTS % "RESOURCE_EXHAUSTED": "0+10x60",
    "pdserve_ttft_seconds_bucket{" + WHERE + ', le="2.5"}': "0+99x60",
    "pdserve_ttft_seconds_bucket{" + WHERE + ', le="+Inf"}': "0+100x60",
    "pdserve_itl_seconds_bucket{" + WHERE + ', le="0.25"}': "0+99x60",
    "pdserve_itl_seconds_bucket{" + WHERE + ', le="+Inf"}': "0+100x60",
    "pdserve_attempts_total{" + WHERE + ', reason="ok"}': "0+1000x60",
    "pdserve_attempts_total{" + WHERE + ', reason="Revoked"}': "0+10x60",
    "pdserve_workers_left_total{" + WHERE + "}": "0x20 1x40",
    "pdserve_workers_refused_total{" + WHERE + ', reason="Incompatible"}': "1x60",
    "pdserve_routers_joined{" + WHERE + "}": "1x60",
    "pdserve_running_sequences{" + WHERE + "}": "3x60",
    "pdserve_steps_total{" + WHERE + "}": "0+500x60",
    "pdserve_kv_blocks{" + WHERE + ', state="free"}': "2x60",
    "pdserve_kv_blocks{" + WHERE + ', state="cached"}': "50x60",
    "pdserve_kv_blocks{" + WHERE + ', state="owned"}': "48x60",
    "pdserve_preemptions_total{" + WHERE + "}": "0+1x60",
    "pdserve_quarantine_age_seconds{" + WHERE + "}": "5x60",
    "pdserve_kv_corrupt_total{" + WHERE + ', peer="p0"}': "1x60",
    "pdserve_links_lost_total{" + WHERE + "}": "0x20 2x40",
    "pdserve_session_crashes_total{" + WHERE + "}": "0x60",
    "pdserve_loop_held_seconds_bucket{" + WHERE + ', le="0.1"}': "0+1000x60",
    "pdserve_loop_held_seconds_bucket{" + WHERE + ', le="+Inf"}': "0+1001x60",
    "pdserve_child_kills_total{" + WHERE + ', reason="time"}': "1x60",
    "pdserve_child_kills_total{" + WHERE + ', reason="cancelled"}': "0+9x60",
    "pdserve_spans_dropped_total{" + WHERE + ', reason="ended"}': "7x60",
}


def scene(series: dict[str, str], minute: int, expression: str, value: int) -> dict[str, Any]:
    """A test of promtool's."""
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": expression,
                "eval_time": f"{minute}m",
                "exp_samples": [{"labels": "{}", "value": value}],
            }
        ],
    }


def run(folder: Path, *scenes: dict[str, Any]) -> None:
    file = folder / "alerts.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "tests": list(scenes)}))
    done = promtool("test", "rules", str(file))
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_rules_are_sound() -> None:
    done = promtool("check", "rules", "--lint-fatal", str(RULES))
    assert done.returncode == 0, done.stderr


def test_there_is_a_scene_for_each() -> None:
    assert list(FIRES) == list(ALERTS)


@pytest.mark.parametrize("name", ALERTS)
def test_it_fires(name: str, tmp_path: Path) -> None:
    series, minute = FIRES[name]
    firing = f'count(ALERTS{{alertname="{name}", alertstate="firing"}})'
    run(tmp_path, scene(series, minute, firing, 1))


def test_none_fires_where_all_is_well(tmp_path: Path) -> None:
    firing = 'count(ALERTS{alertstate="firing"}) or vector(0)'
    run(tmp_path, *(scene(WELL, minute, firing, 0) for minute in (15, 30, 59)))


def test_each_says_what_to_do() -> None:
    page = (ROOT / "docs/operations.md").read_text()
    part = page.partition("\n## Alerts\n")[2].partition("\n## ")[0]
    entries = [line.removeprefix("### ") for line in part.splitlines() if line.startswith("### ")]
    assert entries == list(ALERTS)
    for name, rule in ALERTS.items():
        assert set(rule["annotations"]) == {"summary", "description", "runbook"}
        assert rule["annotations"]["runbook"] == f"docs/operations.md#{name.lower()}"
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
