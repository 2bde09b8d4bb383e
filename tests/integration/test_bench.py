"""`pdserve bench` against real processes: its figures, its files, its mistakes, and how it stops."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import LocalCluster, run_cli

TRACE = "".join(
    json.dumps({"timestamp": 40 * n, "input_length": 600 + n, "output_length": 9, "hash_ids": [1, n]}) + "\n"
    for n in range(2, 22)
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("bench")
    with LocalCluster(folder, "--engine", "fake", "--router.max-queued-requests", "4") as cluster:
        yield cluster


def bench(cluster: LocalCluster, folder: Path, *flags: str) -> dict[str, Any]:
    """Run it; what it wrote as JSON."""
    file = folder / "out.json"
    done = run_cli("bench", "--target", cluster.target, "--json", str(file), *flags)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_a_trace_is_played_with_its_lengths_times_and_prefixes(cluster: LocalCluster, tmp_path: Path) -> None:
    trace, picture = tmp_path / "trace.jsonl", tmp_path / "run.svg"
    trace.write_text(TRACE)
    found = bench(cluster, tmp_path, "--trace", str(trace), "--svg", str(picture), "--slo-ttft-ms", "60000")
    (run,) = found["runs"]
    assert (run["num_sent"], run["num_ok"], run["share_good"]) == (20, 20, 1.0)
    assert run["num_output_tokens"] == 20 * 9
    assert run["num_prompt_tokens"] == sum(600 + n for n in range(2, 22))
    # All but the first few, which came before it was computed, find the block that they share.
    assert run["num_cached_tokens"] >= 512
    for number, each in enumerate(run["each"]):
        assert each["planned_s"] == pytest.approx(0.04 * number)
        assert len(each["token_s"]) >= 1 and each["num_tokens"] == 9
        parts = ("queue", "reserve", "dispatch", "prefill_queue", "prefill", "relay", "rest")
        timings = each["timings"]
        assert sum(timings[f"{part}_ms"] for part in parts) == pytest.approx(timings["ttft_ms"])
        assert (each["token_s"][0] - each["sent_s"]) * 1e3 >= timings["ttft_ms"]
    ET.parse(picture)


def test_refused_requests_are_counted_and_miss_the_objectives(cluster: LocalCluster, tmp_path: Path) -> None:
    flags = ("--concurrency", "400", "--requests", "400", "--prompt-tokens", "2000", "--output-tokens", "2")
    (run,) = bench(cluster, tmp_path, *flags)["runs"]
    assert run["num_refused"] > 0 and run["num_ok"] > 0
    assert run["num_ok"] + run["num_refused"] == run["num_sent"] == 400
    assert run["share_good"] == run["num_ok"] / 400


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        ((), 1, "no load: give --rate R, --concurrency N or --trace F"),
        (("--rate", "1", "--concurrency", "2"), 1, "give one"),
        (("--rate", "0"), 2, "above 0"),
        (("--rate", "nan"), 2, "above 0"),
        (("--requests", "many", "--rate", "1"), 2, "many"),
        (("--rate", "1", "--length-scale", "2"), 1, "for a --trace"),
        (("--trace", "/nowhere.jsonl"), 1, "/nowhere.jsonl: No such file"),
        (("--compare", "--rate", "1"), 1, "give --model or --config"),
        (("--model", "m", "--rate", "1"), 1, "go with --compare"),
        (("--rate", "1", "--json", "/nowhere/out.json"), 1, "/nowhere/out.json: can't be written"),
        (("--rate", "1", "--prompt-tokens", "9999999"), 1, "none of the requests fits the model's window"),
    ],
)
def test_mistakes_are_one_line(cluster: LocalCluster, flags: tuple[str, ...], code: int, said: str) -> None:
    done = run_cli("bench", "--target", cluster.target, *flags)
    assert done.returncode == code and said in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_nobody_at_the_target_is_one_line() -> None:
    done = run_cli("bench", "--target", "127.0.0.1:9", "--rate", "1")
    assert done.returncode == 1 and "127.0.0.1:9" in done.stderr and done.stderr.count("\n") == 1


def test_ctrl_c_ends_it_with_what_was_measured(cluster: LocalCluster, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    flags = ("--target", cluster.target, "--rate", "20", "--requests", "100000", "--json", str(file))
    command = [
        sys.executable,
        "-m",
        "pdserve.cli",
        "bench",
        *flags,
        "--prompt-tokens",
        "8",
        "--output-tokens",
        "2",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "100000 requests" in process.stderr.readline()  # it says what it begins
        process.send_signal(signal.SIGINT)
        said, complained = process.communicate(timeout=60)
    assert process.returncode == 130, complained
    assert "(stopped)" in said and json.loads(file.read_text())["runs"][0]["was_stopped"]


@pytest.mark.slow
def test_two_clusters_are_compared_in_turns(tmp_path: Path) -> None:
    config, file = tmp_path / "config.toml", tmp_path / "out.json"
    config.write_text('[engine]\nkind = "fake"\nfake_step_s = 0.02\nfake_token_s = 0.0005\n')
    flags = ("--rate", "8", "--requests", "40", "--prompt-tokens", "200", "--output-tokens", "10")
    done = run_cli(
        *("bench", "--compare", "--config", str(config), "--rounds", "2", "--json", str(file)),
        *flags,
        limit_s=110.0,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert [run["name"] for run in found["runs"]] == [
        f"{name}, round {number}" for number in (1, 2) for name in ("2 aggregated", "1P+1D")
    ]
    assert all(run["num_sent"] == 40 for run in found["runs"])
    assert found["verdict"] in done.stdout and "95% interval" in found["verdict"]
