"""What a user gets wrong: one line that says what to do, an exit code, no traceback. Each as a command of its own."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from deploy.local.probe import fetch
from pdserve.client import AsyncClient
from tests.support.asking import Question, ask, status_of
from tests.support.processes import run_cli
from tests.support.singles import Singles
from tests.support.waiting import until

FAKE = ("--engine", "fake")
FILES = {
    "broken.toml": "x = ",
    "key.toml": '[router]\nlistn = "127.0.0.1:0"\n',
    "value.toml": '[router]\nmax_attempts = "three"\n',
    "short-secret": "hunter2",
    "no.gguf": "not a model",
    "ids.json": '["one", "two"]',
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("mistakes")
    for name, content in FILES.items():
        (made / name).write_text(content)
    (made / "empty-model").mkdir()
    return made


@pytest.fixture(scope="module")
def taken() -> Iterator[str]:
    """An address that somebody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


# Command line, exit code, what the line must name. FOLDER and TAKEN are put in.
MISTAKES = [
    ("decode --routers 127.0.0.1:1", 2, "--model"),
    ("prefill --model no-such-model", 2, "no-such-model"),
    ("worker --model FOLDER/empty-model", 2, "config.json"),
    ("decode --model FOLDER/no.gguf", 2, "no.gguf"),
    ("router --listen TAKEN", 2, "TAKEN"),
    ("router --listen 127.0.0.1:0 --metrics.listen TAKEN", 2, "metrics.listen"),
    ("decode --engine fake --listen TAKEN", 2, "kv_listen"),
    ("decode --engine fake --cluster.secret-file FOLDER/short-secret", 2, "32 bytes"),
    ("router --config FOLDER/none.toml", 2, "none.toml"),
    ("router --config FOLDER", 2, "directory"),
    ("router --config FOLDER/broken.toml", 2, "broken.toml"),
    ("up --engine fake --config FOLDER/key.toml", 2, "router.listen"),
    ("router --config FOLDER/value.toml", 2, "'three'"),
    ("router --timeouts.link-s 1", 2, "link_s"),
    ("router --router.listn x", 2, "--router.listn"),
    ("up --engine fake --ready-file FOLDER/none/ready.json", 2, "--ready-file"),
    ("up --engine fake --listen 127.0.0.1:0 --log-dir FOLDER/no.gguf", 2, "no.gguf"),
    ("up --model FOLDER/no.gguf", 2, "no.gguf"),
    ("generate --target 127.0.0.1:1 hello", 1, "127.0.0.1:1"),
    ("generate --target localhost hello", 1, "HOST:PORT"),
    ("generate --token-ids-file FOLDER/ids.json", 1, "ids.json"),
    ("status --target 127.0.0.1:1", 1, "127.0.0.1:1"),
    ("chat --target 127.0.0.1:1", 1, "127.0.0.1:1"),
    ("fetch no-such-model", 1, "no-such-model"),
]


@pytest.mark.parametrize(("line", "code", "named"), MISTAKES, ids=[line for line, _, _ in MISTAKES])
def test_one_line_and_an_exit_code(folder: Path, taken: str, line: str, code: int, named: str) -> None:
    def put_in(text: str) -> str:
        return text.replace("FOLDER", str(folder)).replace("TAKEN", taken)

    done = run_cli(*put_in(line).split(), limit_s=60)
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    *logged, told = done.stderr.splitlines()
    assert told.startswith("error: ")
    assert put_in(named) in told
    # Before it at most what every process logs: its settings.
    assert all("[info " in each for each in logged), done.stderr
    assert "Traceback" not in done.stderr


async def test_a_worker_of_another_model_is_told_why_and_never_used(tmp_path: Path) -> None:
    """Here: of another layout of its KV. Both sides name the field and both values; the rest goes on."""
    with Singles(tmp_path) as cluster:
        router = cluster.router("r0")
        cluster.worker("prefill", "p0", *FAKE)
        cluster.worker("decode", "d0", *FAKE)
        other = cluster.worker("decode", "d1", *FAKE, "--engine.block-size", "32")
        cluster.start()
        async with AsyncClient(router.address) as client:

            async def reason() -> str | None:
                status = await status_of(client)
                found = [pair.reason for pair in status.pairs if pair.decode_worker == "d1"] if status else []
                return found[0] if found and found[0] != "ordered" else None

            told = await until("the pair is down", reason, told=cluster.log_tails)
            assert "layout_json" in told and "[2,1,2,16,1]" in told and "[2,1,2,32,1]" in told
            for seed in range(3):
                finished = await ask(client, Question.draw(Random(seed), 40, 8))
                assert finished.decode_worker == "d0"
        assert "layout_json" in other.log.read_text()


async def test_a_worker_that_finds_no_router_says_so(tmp_path: Path) -> None:
    with Singles(tmp_path) as cluster:
        cluster.router("r0")  # never started
        worker = cluster.worker("decode", "d0", *FAKE).start()

        async def has_warned() -> bool:
            return '"router.unreachable"' in worker.log.read_text()

        await until("a warning in the log", has_warned, told=worker.log_tail)
        answer = await fetch(worker.metrics, "/readyz")
        assert answer is not None and answer[0] == 503
        assert "no router" in answer[1]
        assert await asyncio.to_thread(worker.terminate) == 0
