"""`pdserve up` with pdserve's own processes and the fake engine: ready line, ready file, restart, drain, refusals."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import stat
from pathlib import Path

import pytest

from tests.support.pids import wait_gone
from tests.support.processes import LocalCluster, run_cli

LIMIT_S = 60.0
FAKE = ("--engine", "fake", "--engine.num-blocks", "256")


def test_the_ready_file_names_every_process(tmp_path: Path) -> None:
    with LocalCluster(tmp_path, *FAKE, "--prefill", "1", "--decode", "2") as cluster:
        rows = cluster.processes()
        assert [row.id for row in rows] == ["router", "prefill-0", "decode-0", "decode-1"]
        assert [row.role for row in rows] == ["router", "prefill", "decode", "decode"]
        for row in rows:
            os.kill(row.pid, 0)
            assert cluster.metric(row, "process_start_time_seconds") > 0 or row.metrics
        assert run_cli("generate", "--target", cluster.target, "--max-tokens", "4", "hello").returncode == 0
        assert cluster.stop() == 0
        for row in rows:
            asyncio.run(wait_gone(row.pid))


@pytest.mark.parametrize(
    "shape",
    [
        ("--both", "1"),
        ("--both", "1", "--prefill", "1"),
        ("--decode", "1", "--router.allow-local-prefill", "true"),
    ],
    ids=" ".join,
)
def test_workers_that_serve_alone_are_ready_without_a_pair(tmp_path: Path, shape: tuple[str, ...]) -> None:
    with LocalCluster(tmp_path, *FAKE, *shape) as cluster:
        assert run_cli("generate", "--target", cluster.target, "--max-tokens", "4", "hello").returncode == 0


@pytest.mark.parametrize("role", ["decode", "prefill", "router"])
def test_a_killed_process_comes_back_and_serves(tmp_path: Path, role: str) -> None:
    with LocalCluster(
        tmp_path, *FAKE, "--prefill", "1", "--decode", "1", "--log-dir", str(tmp_path)
    ) as cluster:
        before, target = cluster.row(role), cluster.target
        cluster.signal(before, signal.SIGKILL)
        asyncio.run(wait_gone(before.pid))
        answer = run_cli("generate", "--target", target, "--max-tokens", "4", "hello", limit_s=LIMIT_S)
        if role != "router":  # whoever asks a dead router asks too early
            assert answer.returncode == 0, answer.stderr
        cluster.wait_line(lambda line: line.startswith(f"{before.id} is back"), LIMIT_S)
        assert cluster.row(role).pid != before.pid
        assert cluster.target == target
        assert run_cli("generate", "--target", target, "--max-tokens", "4", "hello").returncode == 0


def test_its_processes_share_a_secret_that_nobody_else_sees(tmp_path: Path) -> None:
    with LocalCluster(tmp_path, *FAKE, "--both", "2", "--log.level", "debug") as cluster:
        ready = json.loads((tmp_path / "ready.json").read_text())
        file, operators = Path(ready["secret_file"]), ready["operators"]
        secret = file.read_text().strip()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600 and len(secret) == 64
        for row in cluster.processes():
            for shown in ("cmdline", "environ"):
                assert secret.encode() not in Path(f"/proc/{row.pid}/{shown}").read_bytes()
        own = run_cli("drain", "--worker", "both-1", "--target", operators)  # it finds the file by itself
        assert own.returncode == 0, own.stderr
        other = tmp_path / "other"
        other.write_text("x" * 32)
        refused = run_cli("drain", "--worker", "both-0", "--target", operators, "--secret-file", str(other))
        assert refused.returncode == 1 and "doesn't accept the proof" in refused.stderr
        assert cluster.stop() == 0
        assert secret not in cluster.log_tail(10_000_000)
    assert not file.exists()


def test_an_address_in_use_is_one_line_and_nothing_is_started(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = run_cli("up", *FAKE, "--listen", address, "--log-dir", str(tmp_path))
    assert done.returncode == 2
    assert address in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_is_not_there_is_one_line() -> None:
    done = run_cli("up", "--model", "no-such-model")
    assert done.returncode == 2
    assert "no-such-model" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_what_the_children_refuse_ends_the_start_with_their_words(tmp_path: Path) -> None:
    """A secret file that isn't there is seen by each child only."""
    done = run_cli("up", *FAKE, "--listen", "127.0.0.1:0", "--cluster.secret-file", str(tmp_path / "none"))
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error:")
    assert str(tmp_path / "none") in last
