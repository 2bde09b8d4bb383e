"""How a load shows: a bar in a terminal, lines in the log of every worker that `pdserve up` starts."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pdserve.tokenizer import Tokenizer
from tests.support.processes import START_LIMIT_S, STOP_LIMIT_S, LocalCluster
from tests.unit.engine_torch.random_model import SMALL, write_random_model

HIDDEN_CURSOR, SHOWN_CURSOR = b"\x1b[?25l", b"\x1b[?25h"
NAMES = ("router", "prefill-0", "decode-0", "decode-1")
SMALL_POOL = ("--engine.num-blocks", "64")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = write_random_model(tmp_path_factory.mktemp("model"))
    for name, content in Tokenizer.fake(SMALL["vocab_size"]).files.items():
        (made / name).write_bytes(content)
    return made


@contextmanager
def terminal(*command: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A process whose standard error is a terminal, and our end of that."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "pdserve.cli", *command],
        stderr=theirs,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    )
    os.close(theirs)
    try:
        yield process, ours
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def read_until(end: int, wanted: bytes) -> bytes:
    """All that came, up to the wanted words and a little more. The test's own limit ends a wait for nothing."""
    said = b""
    while wanted not in said:
        said += os.read(end, 1 << 16)
    return said


@pytest.mark.timeout(START_LIMIT_S + STOP_LIMIT_S)
def test_a_bar_in_a_terminal(folder: Path) -> None:
    command = ("worker", "--model", str(folder), "--routers", "127.0.0.1:1", "--engine.threads", "1")
    with terminal(*command, *SMALL_POOL) as (process, end):
        said = read_until(end, b"model.loaded").decode()
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_LIMIT_S) == 0
    size = (folder / "model.safetensors").stat().st_size // 1000
    shown = re.findall(r"weights .*?([\d.]+)/([\d.]+) (kB|MB)", said)
    assert shown, said
    assert abs(float(shown[-1][1]) * {"kB": 1, "MB": 1000}[shown[-1][2]] - size) < 0.05 * size
    assert shown[-1][0] == shown[-1][1]
    assert said.index(SHOWN_CURSOR.decode()) < said.index("model.loaded")  # the bar is at its end
    assert "model.loading" not in said


@pytest.mark.timeout(START_LIMIT_S + STOP_LIMIT_S)
def test_a_stop_while_it_loads_leaves_the_terminal_as_it_was(folder: Path) -> None:
    command = ("worker", "--model", str(folder), "--routers", "127.0.0.1:1", "--engine.threads", "1")
    with terminal(*command, *SMALL_POOL) as (process, end):
        said = read_until(end, HIDDEN_CURSOR)
        process.send_signal(signal.SIGTERM)
        if SHOWN_CURSOR not in said:
            read_until(end, SHOWN_CURSOR)
        assert process.wait(STOP_LIMIT_S) == 0


@pytest.mark.timeout(START_LIMIT_S + STOP_LIMIT_S)
def test_a_cluster_in_a_terminal_is_a_line_a_process_and_one_bar(folder: Path) -> None:
    command = ("up", "--model", str(folder), "--decode", "2", "--prefill", "1", "--listen", "127.0.0.1:0")
    with terminal(*command, "--engine.threads", "1", *SMALL_POOL) as (process, end):
        said = read_until(end, SHOWN_CURSOR)
        while not all(f"{name} is ready, in " in said.decode() for name in NAMES):
            said += os.read(end, 1 << 16)
        process.send_signal(signal.SIGTERM)
        said += read_until(end, b"draining, at most")
        assert process.wait(STOP_LIMIT_S) == 0
    lines = [
        line for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said.decode()).splitlines() if line.strip()
    ]
    bars = [line for line in lines if "loading 3 workers" in line]
    size = 3 * (folder / "model.safetensors").stat().st_size / 1e6
    assert bars and any(f"of {size:,.0f} MB" in bar for bar in bars)
    rest = [re.sub(r"[\d.]+ s", "N s", line.strip()) for line in lines if line not in bars]
    rest = [line for line in rest if not line.startswith("still waiting for ")]  # on a machine under load
    *ready, draining = rest
    assert sorted(ready) == sorted(f"{name} is ready, in N s" for name in NAMES)
    assert draining.startswith("draining, at most N s")


def test_lines_in_the_log(folder: Path, tmp_path: Path) -> None:
    arguments = ("--model", str(folder), "--engine.threads", "1", *SMALL_POOL)
    with LocalCluster(tmp_path, *arguments) as cluster:
        lines = cluster.log_tail(1_000_000).splitlines()
        for row in (cluster.row("prefill"), cluster.row("decode")):
            assert cluster.metric(row, "pdserve_model_load_seconds") > 0
            size = (folder / "model.safetensors").stat().st_size
            assert cluster.metric(row, "pdserve_model_bytes") == pytest.approx(size, rel=0.05)
            assert cluster.metric(row, "pdserve_model_loaded_bytes") > 0
    assert sum("is ready, in" in line for line in lines) == 3
    assert "configured" not in "".join(lines), "that is for --log.level debug"
    for worker in ("prefill-0", "decode-0"):
        begun, done = (
            [line for line in lines if line.startswith(worker) and event in line]
            for event in ("model.loading", "model.loaded")
        )
        assert begun and "total_bytes=" in begun[0]
        assert len(done) == 1 and "total_bytes=" in done[0] and "took_s=" in done[0]
