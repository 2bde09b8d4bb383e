"""The small parts of the supervisor: ready file, reserved ports, output, the children's environment."""

from __future__ import annotations

import io
import json
import socket
from pathlib import Path

import pytest

from deploy.local.output import FolderOutput, PrefixedOutput
from deploy.local.plan import ClusterPlan, ProcessSpec
from deploy.local.ports import PortReservations
from deploy.local.ready_file import ProcessRow, remove_ready_file, write_ready_file
from pdserve.service.settings import ConfigError

ROW = ProcessRow("decode", "decode-0", 4711, "127.0.0.1:9102")


def test_the_ready_file_has_the_documented_form_and_leaves_no_scratch(tmp_path: Path) -> None:
    path = tmp_path / "ready.json"
    router = ProcessSpec(role="router", id="r", command=(), metrics="", environ={})
    plan = ClusterPlan(
        target="127.0.0.1:50051",
        http="http://127.0.0.1:8000",
        operators="127.0.0.1:50052",
        secret_file="/s",
        router=router,
        workers=(),
    )
    write_ready_file(path, plan, [])
    write_ready_file(path, plan, [ROW])
    assert json.loads(path.read_text()) == {
        "router": "127.0.0.1:50051",
        "http": "http://127.0.0.1:8000",
        "operators": "127.0.0.1:50052",
        "secret_file": "/s",
        "processes": [{"role": "decode", "id": "decode-0", "pid": 4711, "metrics": "127.0.0.1:9102"}],
    }
    assert list(tmp_path.iterdir()) == [path]
    remove_ready_file(path)
    remove_ready_file(path)
    assert not path.exists()


def listen_on(port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen()
    return listener


def test_a_reserved_port_can_be_listened_on_again_and_again() -> None:
    with PortReservations() as ports:
        port = ports.reserve("127.0.0.1", 0)
        for _ in range(2):
            listen_on(port).close()


def test_two_reservations_differ() -> None:
    with PortReservations() as ports:
        assert len({ports.reserve("127.0.0.1", 0) for _ in range(20)}) == 20


def test_a_port_in_use_is_refused_by_its_name() -> None:
    with PortReservations() as ports, listen_on(0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
            ports.reserve("127.0.0.1", port)


def test_a_host_of_another_machine_is_refused() -> None:
    with PortReservations() as ports, pytest.raises(ConfigError, match=r"192\.0\.2\.1:0"):
        ports.reserve("192.0.2.1", 0)


def test_lines_on_one_stream_say_whose_they_are() -> None:
    stream = io.StringIO()
    output = PrefixedOutput(stream, 9)
    output.line("router", "hello")
    output.line("prefill-0", "there")
    assert stream.getvalue() == "router    | hello\nprefill-0 | there\n"


def test_a_folder_has_one_file_a_process_and_is_appended_to(tmp_path: Path) -> None:
    for word in ("one", "two"):
        with FolderOutput(tmp_path / "logs") as output:
            output.line("router", word)
            output.line("decode-0", word)
    assert (tmp_path / "logs" / "router.log").read_text() == "one\ntwo\n"
    assert (tmp_path / "logs" / "decode-0.log").read_text() == "one\ntwo\n"
