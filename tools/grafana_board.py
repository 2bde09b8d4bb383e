"""Writes the Grafana board, deploy/grafana/pdserve.json, from the panels below.

    python tools/grafana_board.py

A test compares the file with this, and asks a real Prometheus for each query.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parents[1] / "deploy" / "grafana" / "pdserve.json"
WIDTH, HEIGHT = 24, 8
JOB = 'job=~"$job"'
RATE = "[$__rate_interval]"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph. queries: legend → expression; unit: as Grafana names it."""

    title: str
    unit: str
    queries: Mapping[str, str]
    stacked: bool = False
    about: str = ""


def rate(metric: str, by: str = "", also: str = "") -> str:
    """Per second, summed; 0 while it has never counted."""
    what = f"rate({metric}{{{JOB}{also}}}{RATE})"
    return f"sum by ({by}) ({what})" if by else f"sum({what}) or on() vector(0)"


def rate_or_nothing_yet(metric: str, by: str, also: str = "") -> str:
    """As `rate` by labels, of what needn't ever happen."""
    return f"{rate(metric, by, also)} or on() vector(0)"


def percentile(metric: str, share: float, by: str = "") -> str:
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, sum by ({labels}) (rate({metric}_bucket{{{JOB}}}{RATE})))"


def percentiles(metric: str) -> dict[str, str]:
    return {f"p{round(100 * share)}": percentile(metric, share) for share in (0.5, 0.95, 0.99)}


def total(metric: str, by: str = "", also: str = "") -> str:
    return f"sum by ({by}) ({metric}{{{JOB}{also}}})" if by else f"sum({metric}{{{JOB}{also}}})"


ROWS: Mapping[str, Sequence[Panel]] = {
    "Requests": (
        Panel(
            "Requests by status",
            "reqps",
            {"{{status}}": rate("pdserve_requests_total", "status")},
            stacked=True,
        ),
        Panel("Time to first token", "s", percentiles("pdserve_ttft_seconds")),
        Panel("Gap between two tokens", "s", percentiles("pdserve_itl_seconds")),
        Panel("In the queue", "s", percentiles("pdserve_queue_seconds"), about="Received to credit held."),
        Panel(
            "Running and waiting",
            "short",
            {"running": total("pdserve_requests_running"), "waiting": total("pdserve_queue_places")},
        ),
        Panel(
            "Tokens",
            "short",
            {
                "prompt": rate("pdserve_prompt_tokens_total"),
                "of these from the cache": rate("pdserve_prompt_tokens_cached_total"),
                "answers": rate("pdserve_completion_tokens_total"),
            },
            about="A second.",
        ),
        Panel(
            "Refused",
            "reqps",
            {
                "queue: {{reason}}": rate_or_nothing_yet("pdserve_queue_refused_total", "reason"),
                "too large: {{what}}": rate_or_nothing_yet("pdserve_requests_too_large_total", "what"),
                "key: {{status}}": rate_or_nothing_yet("pdserve_calls_refused_total", "status"),
            },
        ),
        Panel(
            "Attempts that didn't end well",
            "ops",
            {"{{reason}}": rate_or_nothing_yet("pdserve_attempts_total", "reason", ', reason!="ok"')},
            about="They begin again elsewhere: clients don't see them.",
        ),
        Panel(
            "Attempts by phase",
            "short",
            {"{{phase}}": total("pdserve_attempts_running", "phase")},
            stacked=True,
        ),
    ),
    "HTTP": (
        Panel(
            "HTTP requests by path and status",
            "reqps",
            {"{{endpoint}} {{status}}": rate("pdserve_http_requests_total", "endpoint, status")},
            stacked=True,
            about="Of routers and gateways; gone: the client hung up first.",
        ),
        Panel("HTTP streams", "short", {"{{instance}}": total("pdserve_http_streams", "instance")}),
        Panel("HTTP clients that hung up", "reqps", {"all": rate("pdserve_http_disconnects_total")}),
    ),
    "Workers": (
        Panel(
            "Workers and pairs",
            "short",
            {"{{role}}": total("pdserve_workers", "role"), "pairs": total("pdserve_pairs_up")},
        ),
        Panel(
            "KV blocks",
            "short",
            {"{{instance}} {{state}}": total("pdserve_kv_blocks", "instance, state")},
            stacked=True,
        ),
        Panel(
            "Sequences in the batch",
            "short",
            {"{{instance}}": total("pdserve_running_sequences", "instance")},
        ),
        Panel(
            "Waiting at workers",
            "short",
            {
                "{{instance}} requests": total("pdserve_waiting_requests", "instance"),
                "{{instance}} prompt tokens": total("pdserve_queued_prompt_tokens", "instance"),
            },
        ),
        Panel(
            "Engine step, p95", "s", {"{{instance}}": percentile("pdserve_step_seconds", 0.95, "instance")}
        ),
        Panel(
            "Tokens computed",
            "short",
            {
                "{{instance}} prompt": rate("pdserve_prefill_tokens_total", "instance"),
                "{{instance}} answers": rate("pdserve_decode_tokens_total", "instance"),
            },
            about="A second.",
        ),
        Panel(
            "Prefix cache",
            "percentunit",
            {
                "hits": f"sum(rate(pdserve_cache_hit_tokens_total{{{JOB}}}{RATE})) "
                f"/ sum(rate(pdserve_cache_query_tokens_total{{{JOB}}}{RATE}))"
            },
            about="Share of the prompt tokens that were looked up.",
        ),
        Panel(
            "Blocks taken back",
            "ops",
            {
                "{{instance}} preempted": rate("pdserve_preemptions_total", "instance"),
                "{{instance}} grants revoked": rate("pdserve_revocations_total", "instance"),
            },
        ),
        Panel(
            "Oldest quarantine",
            "s",
            {"{{instance}}": f"max by (instance) (pdserve_quarantine_age_seconds{{{JOB}}})"},
        ),
    ),
    "KV between workers": (
        Panel("Bytes", "Bps", {"received": rate("pdserve_kv_received_bytes_total")}),
        Panel(
            "A hand-off's transfer",
            "s",
            {
                "mean": f"sum(rate(pdserve_kv_transfer_seconds_total{{{JOB}}}{RATE})) "
                f'/ sum(rate(pdserve_kv_handoffs_total{{{JOB}, outcome="received"}}{RATE}))'
            },
        ),
        Panel("Hand-offs", "ops", {"{{outcome}}": rate("pdserve_kv_handoffs_total", "outcome")}),
        Panel(
            "Links",
            "short",
            {
                "{{instance}} up": total("pdserve_links", "instance"),
                "{{instance}} lost": f"sum by (instance) (increase(pdserve_links_lost_total{{{JOB}}}{RATE}))",
            },
        ),
        Panel(
            "Damaged or stale",
            "ops",
            {
                "corrupt": rate("pdserve_kv_corrupt_total"),
                "stale": rate("pdserve_kv_stale_total"),
                "malformed": rate("pdserve_kv_malformed_total"),
            },
        ),
    ),
    "Processes": (
        Panel(
            "Event loop held by itself, p99",
            "s",
            {"{{instance}}": percentile("pdserve_loop_held_seconds", 0.99, "instance")},
        ),
        Panel(
            "Event loop late, p99",
            "s",
            {"{{instance}}": percentile("pdserve_loop_lag_seconds", 0.99, "instance")},
        ),
        Panel(
            "Children",
            "short",
            {
                "killed: {{reason}}": rate_or_nothing_yet("pdserve_child_kills_total", "reason"),
                "refused": rate("pdserve_child_jobs_refused_total"),
            },
        ),
        Panel(
            "Wrong",
            "ops",
            {
                "workers left": rate("pdserve_workers_left_total"),
                "workers refused": rate("pdserve_workers_refused_total"),
                "books": rate("pdserve_books_wrong_total"),
                "session crashes": rate("pdserve_session_crashes_total"),
            },
        ),
        Panel(
            "Spans",
            "ops",
            {
                "exported": rate("pdserve_spans_exported_total"),
                "dropped: {{reason}}": rate_or_nothing_yet("pdserve_spans_dropped_total", "reason"),
            },
        ),
    ),
}


def board() -> dict[str, Any]:
    """As Grafana imports it."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS.items():
        place = {"h": 1, "w": WIDTH, "x": 0, "y": top}
        panels.append(
            {
                "type": "row",
                "title": title,
                "id": len(panels) + 1,
                "collapsed": False,
                "gridPos": place,
                "panels": [],
            }
        )
        top += 1
        for number, panel in enumerate(row):
            at = {
                "h": HEIGHT,
                "w": WIDTH // 3,
                "x": number % 3 * (WIDTH // 3),
                "y": top + number // 3 * HEIGHT,
            }
            panels.append(_panel(panel, len(panels) + 1, at))
        top += -(-len(row) // 3) * HEIGHT
    return {
        "uid": "pdserve",
        "title": "pdserve",
        "tags": ["pdserve", "llm"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_source_variable(), _job_variable()]},
        "panels": panels,
    }


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    return {
        "type": "timeseries",
        "id": number,
        "title": panel.title,
        "description": panel.about,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {
            "defaults": {
                "unit": panel.unit,
                "min": 0,
                "custom": {
                    "fillOpacity": 30 if panel.stacked else 0,
                    "stacking": {"mode": "normal" if panel.stacked else "none"},
                },
            },
            "overrides": [],
        },
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + place), "datasource": SOURCE, "expr": expression, "legendFormat": legend}
            for place, (legend, expression) in enumerate(panel.queries.items())
        ],
    }


def _source_variable() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}


def _job_variable() -> dict[str, Any]:
    return {
        "name": "job",
        "type": "query",
        "label": "Job",
        "datasource": SOURCE,
        "query": {"query": "label_values(pdserve_loop_lag_seconds_count, job)", "refId": "job"},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
    }


def text() -> str:
    """Of the file."""
    return json.dumps(board(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(text(), encoding="utf-8")
    sys.stdout.write(f"{FILE}\n")
