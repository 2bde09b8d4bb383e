"""aiperf and guidellm, as they come, measure `pdserve up`: nothing fails, and they count what the router counts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.foreign_clients import AIPERF, GUIDELLM
from tests.support.processes import LocalCluster

MODEL = "smollm2-135m"
NUM_REQUESTS, STREAMS = 20, 4
PROMPT_TOKENS, MAX_TOKENS = 32, 8

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@contextmanager
def counted(cluster: LocalCluster) -> Iterator[dict[str, int]]:
    """Tokens that the router counts in the block; there at its end."""
    router, found = cluster.row("router"), dict[str, int]()
    names = ("prompt_tokens", "completion_tokens")
    before = [cluster.metric(router, f"pdserve_{name}_total") for name in names]
    yield found
    after = [cluster.metric(router, f"pdserve_{name}_total") for name in names]
    found.update({name: round(late - soon) for name, late, soon in zip(names, after, before)})


@AIPERF.needed
def test_aiperf(smollm2_cluster: LocalCluster, smollm2: Path, tmp_path: Path) -> None:
    with counted(smollm2_cluster) as tokens:
        AIPERF.run(
            "aiperf", "profile", "--model", MODEL, "--url", smollm2_cluster.http,
            "--endpoint-type", "chat", "--streaming", "--extra-inputs", "ignore_eos:true",
            "--concurrency", str(STREAMS), "--request-count", str(NUM_REQUESTS), "--random-seed", "1",
            "--tokenizer", str(smollm2), "--apply-chat-template",
            "--synthetic-input-tokens-mean", str(PROMPT_TOKENS), "--output-tokens-mean", str(MAX_TOKENS),
            "--no-gpu-telemetry", "--ui", "none", "--artifact-dir", str(tmp_path),
            folder=tmp_path,
        )  # fmt: skip
    report = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert report["is_complete"] and not report["was_cancelled"] and not report["error_summary"]
    assert report["request_count"]["avg"] == report["completed_request_count"]["avg"] == NUM_REQUESTS
    assert report["request_error_rate"]["avg"] == 0
    check_times(report["time_to_first_token"])
    check_times(report["inter_token_latency"])
    # What it made its prompts of is what the template, and the tokenizer, made of them here.
    assert (
        report["total_usage_prompt_tokens"]["avg"] == NUM_REQUESTS * PROMPT_TOKENS == tokens["prompt_tokens"]
    )
    assert report["total_usage_completion_tokens"]["avg"] == NUM_REQUESTS * MAX_TOKENS
    assert tokens["completion_tokens"] == NUM_REQUESTS * MAX_TOKENS
    scraped = json.loads((tmp_path / "server_metrics_export.json").read_text())
    assert "pdserve_completion_tokens" in scraped["metrics"], "it reads our /metrics, too"


@GUIDELLM.needed
def test_guidellm(smollm2_cluster: LocalCluster, smollm2: Path, tmp_path: Path) -> None:
    backend = f"kind=openai_http,target={smollm2_cluster.http},request_format=/v1/chat/completions"
    with counted(smollm2_cluster) as tokens:
        GUIDELLM.run(
            "guidellm", "run", "--backend", backend,
            "--profile", f"kind=concurrent,streams={STREAMS}",
            "--constraint", f"kind=max_requests,count={NUM_REQUESTS}",
            "--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={MAX_TOKENS}",
            "--tokenizer", f"kind=huggingface_auto,model={smollm2}",
            "--output", f"kind=json,path={tmp_path / 'report.json'}", "--disable-console",
            folder=tmp_path, env={"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
    (report,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    made = report["scheduler_metrics"]["requests_made"]
    assert made == {"successful": NUM_REQUESTS, "errored": 0, "incomplete": 0, "total": NUM_REQUESTS}
    check_times(report["metrics"]["time_to_first_token_ms"]["successful"])
    check_times(report["metrics"]["inter_token_latency_ms"]["successful"])
    asked = report["requests"]["successful"]
    assert [each["output_metrics"]["text_tokens"] for each in asked] == [MAX_TOKENS] * NUM_REQUESTS
    assert sum(each["input_metrics"]["text_tokens"] for each in asked) == tokens["prompt_tokens"]
    assert tokens["completion_tokens"] == NUM_REQUESTS * MAX_TOKENS


def check_times(found: dict[str, Any]) -> None:
    """A distribution of milliseconds over all requests."""
    assert found["count"] >= NUM_REQUESTS
    assert 0 < found["min"] <= found["max"]
