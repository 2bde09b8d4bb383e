"""The supervisor with real processes: restart, back-off, giving up, drain, no orphans.

The children here are a small program that knows the two things the supervisor asks of a child: /readyz, and an end
on SIGTERM. What the supervisor does to pdserve's own processes is in test_supervisor_up.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest

from deploy.local.plan import ClusterPlan, ProcessSpec
from deploy.local.ports import PortReservations
from deploy.local.restarts import RestartPolicy
from deploy.local.screen import LoadedPart
from deploy.local.supervisor import Supervisor
from pdserve.clock import SystemClock
from tests.support.pids import wait_gone

CHILD = """
import http.server, os, signal, sys

port, behaviour, journal = int(sys.argv[1]), sys.argv[2], sys.argv[3]

def note(word):
    with open(journal, "a") as file:
        file.write(f"{sys.argv[4]} {word} {os.getpid()}\\n")

note("started")
if behaviour.startswith("exit"):
    print("what went wrong", flush=True)
    sys.exit(int(behaviour[4:]))

class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        is_ready = behaviour != "loads"
        self.send_response(404 if self.path != "/readyz" else 200 if is_ready else 503)
        self.end_headers()
        if not is_ready:
            self.wfile.write(b"the model is loading: 1 of 2 MB\\nno router joined\\n")
    def log_message(self, *args):
        pass

def end(*args):
    note("ended")
    if behaviour != "deaf":
        os._exit(0)

def end_for_good(*args):
    os._exit(78)

signal.signal(signal.SIGTERM, end)
signal.signal(signal.SIGUSR1, end_for_good)
print("listening", flush=True)
http.server.HTTPServer(("127.0.0.1", port), Answer).serve_forever()
"""

LIMIT_S = 30.0


class Lines:
    """Collects what the supervisor and its children say; an event at each line."""

    def __init__(self) -> None:
        self.all: list[tuple[str, str]] = []
        self.loads: list[list[tuple[int, int]]] = []
        self._came = asyncio.Event()

    def line(self, source: str, text: str) -> None:
        self.all.append((source, text))
        self._came.set()

    # --- Screen

    def tell(self, text: str) -> None:
        self.line("up", text)

    def say(self, text: str) -> None:
        self.line("said", text)

    def loading(self, parts: Sequence[LoadedPart]) -> None:
        self.loads.append([(part.num_bytes, part.total_bytes) for part in parts])

    def texts(self, source: str) -> list[str]:
        return [text for name, text in self.all if name == source]

    async def until(self, source: str, part: str, count: int = 1) -> str:
        """The count-th line of `source` that contains `part`."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                found = [text for text in self.texts(source) if part in text]
                if len(found) >= count:
                    return found[count - 1]
                self._came.clear()
                await self._came.wait()


class Harness:
    """A supervisor over stand-in children in this process's event loop."""

    def __init__(
        self, folder: Path, ports: PortReservations, behaviours: dict[str, str], drain_s: float
    ) -> None:
        self.folder = folder
        self.lines = Lines()
        self.ready_file = folder / "ready.json"
        self.journal = folder / "journal"
        self.ports = ports
        specs = [self.spec(name, behaviour) for name, behaviour in behaviours.items()]
        self.supervisor = Supervisor(
            ClusterPlan(
                target="127.0.0.1:1",
                operators="127.0.0.1:2",
                secret_file="",
                router=specs[0],
                workers=tuple(specs[1:]),
            ),
            policy=RestartPolicy(
                first_delay_s=0.05, final_exits={78: "its configuration is wrong"}, final_starts={}
            ),
            output=self.lines,
            screen=self.lines,
            title="a test",
            ready_file=self.ready_file,
            drain_s=drain_s,
            clock=SystemClock(),
            extra_ready=_at_once,
            slow_start_s=0.3,
        )

    def spec(self, name: str, behaviour: str) -> ProcessSpec:
        port = self.ports.reserve("127.0.0.1", 0)
        command = (sys.executable, "-c", CHILD, str(port), behaviour, str(self.journal), name)
        metrics = f"127.0.0.1:{port}"
        return ProcessSpec(role=name, id=name, command=command, metrics=metrics, environ=os.environ)

    def pid(self, name: str) -> int:
        rows = json.loads(self.ready_file.read_text())["processes"]
        return int(next(row["pid"] for row in rows if row["id"] == name))

    def journal_of(self, word: str) -> list[str]:
        lines = [line.split() for line in self.journal.read_text().splitlines()]
        return [name for name, what, _ in lines if what == word]

    def started_pids(self) -> list[int]:
        return [int(line.split()[2]) for line in self.journal.read_text().splitlines() if " started " in line]


async def _at_once(plan: ClusterPlan) -> bool:
    return True


Start = Callable[..., "contextlib.AbstractAsyncContextManager[tuple[Harness, asyncio.Task[str | None]]]"]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Runs a supervisor for the block; whatever happens, nothing it started is left."""

    @contextlib.asynccontextmanager
    async def running(
        behaviours: dict[str, str], drain_s: float = 20.0
    ) -> AsyncIterator[tuple[Harness, asyncio.Task[str | None]]]:
        with PortReservations() as ports:
            harness = Harness(tmp_path, ports, behaviours, drain_s)
            task = asyncio.create_task(harness.supervisor.run())
            try:
                yield harness, task
            finally:
                if not task.done():
                    task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    async with asyncio.timeout(LIMIT_S):
                        await task
            for pid in harness.started_pids():
                await wait_gone(pid)

    return running


GOOD = {"router": "serve", "prefill-0": "serve", "decode-0": "serve"}


async def test_one_ready_line_and_a_ready_file_when_all_are_ready(start: Start) -> None:
    async with start(GOOD) as (harness, _):
        line = await harness.lines.until("said", "ready")
        assert "127.0.0.1:1" in line
        content = json.loads(harness.ready_file.read_text())
        assert content["router"] == "127.0.0.1:1"
        assert [row["id"] for row in content["processes"]] == list(GOOD)
        assert all(os.getpgid(row["pid"]) == row["pid"] for row in content["processes"])
        assert harness.lines.texts("decode-0") == ["listening"]


async def test_a_slow_start_says_what_each_process_lacks(start: Start) -> None:
    async with start({**GOOD, "decode-0": "loads"}) as (harness, _):
        said = "still waiting for decode-0 (the model is loading: 1 of 2 MB, no router joined)"
        await harness.lines.until("up", said, count=2)
        assert not harness.lines.texts("said")


async def test_sigterm_drains_the_router_before_the_workers(start: Start) -> None:
    async with start(GOOD) as (harness, task):
        await harness.lines.until("said", "ready")
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(task, LIMIT_S) is None
        assert harness.journal_of("ended")[0] == "router"
        assert sorted(harness.journal_of("ended")) == sorted(GOOD)
        assert not harness.ready_file.exists()


async def test_a_killed_child_is_started_again_and_the_ready_file_follows(start: Start) -> None:
    async with start(GOOD) as (harness, _):
        await harness.lines.until("said", "ready")
        first, others = harness.pid("decode-0"), (harness.pid("router"), harness.pid("prefill-0"))
        os.kill(first, signal.SIGKILL)
        assert "SIGKILL" in await harness.lines.until("up", "decode-0 was killed")
        await harness.lines.until("said", "decode-0 is back")
        assert harness.pid("decode-0") != first
        assert (harness.pid("router"), harness.pid("prefill-0")) == others


async def test_ends_in_a_row_lengthen_the_pause_and_the_line_says_so(start: Start) -> None:
    async with start(GOOD) as (harness, _):
        await harness.lines.until("said", "ready")
        for count in range(1, 4):
            os.kill(harness.pid("decode-0"), signal.SIGKILL)
            await harness.lines.until("said", "decode-0 is back", count)
        told = [text for text in harness.lines.texts("up") if "decode-0 was killed" in text]
        assert ["in 0.05 s" in told[0], "in 0.1 s" in told[1], "in 0.2 s" in told[2]] == [True] * 3
        assert "3 times in a row" in told[2]


async def test_a_child_that_never_becomes_ready_ends_the_start_with_its_last_words(start: Start) -> None:
    async with start({**GOOD, "decode-0": "exit3"}) as (harness, task):
        fault = await asyncio.wait_for(task, LIMIT_S)
        assert fault is not None
        assert "decode-0 ended with exit code 3" in fault
        assert "what went wrong" in fault
        assert harness.journal_of("started").count("decode-0") == 3
        assert not harness.lines.texts("said")


async def test_a_final_exit_is_not_tried_again(start: Start) -> None:
    async with start({**GOOD, "prefill-0": "exit78"}) as (harness, task):
        fault = await asyncio.wait_for(task, LIMIT_S)
        assert fault is not None
        assert "configuration is wrong" in fault
        assert harness.journal_of("started").count("prefill-0") == 1


async def test_a_worker_that_must_not_come_back_leaves_the_others_alone(start: Start) -> None:
    async with start({**GOOD, "decode-1": "serve"}) as (harness, task):
        await harness.lines.until("said", "ready")
        os.kill(harness.pid("decode-1"), signal.SIGUSR1)
        assert "not started again" in await harness.lines.until("up", "decode-1 ended")
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(task, LIMIT_S) is None
        assert harness.journal_of("started").count("decode-1") == 1
        assert harness.journal_of("started").count("decode-0") == 1


def ids_of(harness: Harness) -> list[str]:
    return [row["id"] for row in json.loads(harness.ready_file.read_text())["processes"]]


async def test_a_worker_that_is_added_is_kept_running_like_the_others(start: Start) -> None:
    async with start(GOOD) as (harness, task):
        await harness.lines.until("said", "ready")
        harness.supervisor.add(harness.spec("decode-1", "serve"))
        await harness.lines.until("said", "decode-1 is here")
        assert ids_of(harness) == [*GOOD, "decode-1"]
        os.kill(harness.pid("decode-1"), signal.SIGKILL)
        await harness.lines.until("said", "decode-1 is back")
        os.kill(os.getpid(), signal.SIGTERM)
        harness.supervisor.add(harness.spec("decode-2", "serve"))
        assert await asyncio.wait_for(task, LIMIT_S) is None
        assert sorted(harness.journal_of("ended")) == sorted([*GOOD, "decode-1"])


async def test_a_worker_that_is_removed_drains_and_stays_away(start: Start) -> None:
    async with start({**GOOD, "decode-1": "serve"}) as (harness, task):
        await harness.lines.until("said", "ready")
        harness.supervisor.remove("decode-1")
        await harness.lines.until("up", "decode-1 has gone")
        assert ids_of(harness) == list(GOOD)
        assert harness.supervisor.worker_ids == ("prefill-0", "decode-0")
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(task, LIMIT_S) is None
        assert harness.journal_of("ended").count("decode-1") == 1
        assert harness.journal_of("started").count("decode-1") == 1


async def test_one_that_does_not_drain_in_time_is_killed_and_the_others_are_not(start: Start) -> None:
    async with start({**GOOD, "decode-1": "deaf"}, drain_s=-4.9) as (
        harness,
        _,
    ):  # beside what closing may take
        await harness.lines.until("said", "ready")
        others = harness.pid("decode-0"), harness.pid("router")
        harness.supervisor.remove("decode-1")
        await harness.lines.until("up", "decode-1 has not drained in time")
        await harness.lines.until("up", "decode-1 has gone: it was killed by SIGKILL")
        assert (harness.pid("decode-0"), harness.pid("router")) == others


async def test_one_that_is_removed_while_it_starts_ends_too(start: Start) -> None:
    async with start(GOOD) as (harness, _):
        await harness.lines.until("said", "ready")
        harness.supervisor.add(harness.spec("decode-1", "loads"))
        await harness.lines.until("decode-1", "listening")
        harness.supervisor.remove("decode-1")
        await harness.lines.until("up", "decode-1 has gone")
        assert ids_of(harness) == list(GOOD)


async def test_an_added_worker_that_never_starts_leaves_the_others_alone(start: Start) -> None:
    async with start(GOOD) as (harness, task):
        await harness.lines.until("said", "ready")
        harness.supervisor.add(harness.spec("decode-1", "exit78"))
        await harness.lines.until("up", "not started again")
        harness.supervisor.remove("decode-1")
        assert harness.supervisor.worker_ids == ("prefill-0", "decode-0")
        assert not task.done()


async def test_a_second_signal_kills_what_does_not_drain(start: Start) -> None:
    async with start({**GOOD, "router": "deaf"}) as (harness, task):
        await harness.lines.until("said", "ready")
        pids = harness.started_pids()
        os.kill(os.getpid(), signal.SIGINT)
        await harness.lines.until("up", "draining")
        os.kill(os.getpid(), signal.SIGINT)
        assert await asyncio.wait_for(task, LIMIT_S) is not None
        for pid in pids:
            await wait_gone(pid)


async def test_no_child_outlives_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    """Also one that is stopped and could not hear SIGTERM."""
    script = tmp_path / "supervise.py"
    script.write_text(
        "import asyncio, pathlib, sys\n"
        "from deploy.local.ports import PortReservations\n"
        "from tests.fault.test_supervisor import GOOD, Harness\n"
        "async def main():\n"
        "    with PortReservations() as ports:\n"
        "        harness = Harness(pathlib.Path(sys.argv[1]), ports, GOOD, 20.0)\n"
        "        task = asyncio.create_task(harness.supervisor.run())\n"
        "        print(await harness.lines.until('said', 'ready'), flush=True)\n"
        "        await task\n"
        "asyncio.run(main())\n"
    )
    root = str(Path(__file__).resolve().parents[2])
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": root},
    )
    assert process.stdout is not None
    try:
        readable, _, _ = await asyncio.to_thread(select.select, [process.stdout], [], [], LIMIT_S)
        assert readable
        assert b"ready" in process.stdout.readline()
        rows = json.loads((tmp_path / "ready.json").read_text())["processes"]
        pids = [int(row["pid"]) for row in rows]
        os.kill(pids[-1], signal.SIGSTOP)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    for pid in pids:
        await wait_gone(pid)
