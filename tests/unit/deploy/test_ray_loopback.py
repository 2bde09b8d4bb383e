"""Which Ray clusters are on loopback only."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from deploy.ray.loopback import is_on_loopback


@pytest.mark.parametrize("address", ["ray://h:1", "nowhere", "10.255.0.1:6379"])
def test_others_are_not(address: str) -> None:
    assert not is_on_loopback(address)


def test_one_of_the_command_itself_is() -> None:
    assert is_on_loopback("local")


def test_what_listens_on_loopback_only_is() -> None:
    with socket.create_server(("127.0.0.1", 0)) as here:
        assert is_on_loopback(f"127.0.0.1:{here.getsockname()[1]}")


def test_what_listens_everywhere_is_not() -> None:
    with socket.create_server(("", 0)) as everywhere:
        assert not is_on_loopback(f"127.0.0.1:{everywhere.getsockname()[1]}")


def test_auto_is_that_of_a_node_of_this_machine(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as here:
        for pid, command in (
            (1, "init"),
            (7, f"raylet\0--gcs-address=127.0.0.1:{here.getsockname()[1]}\0--x"),
        ):
            (tmp_path / f"{pid}").mkdir()
            (tmp_path / f"{pid}/cmdline").write_text(command)
        assert is_on_loopback("auto", {}, tmp_path)
    assert not is_on_loopback("auto", {"RAY_ADDRESS": "10.255.0.1:6379"}, tmp_path)
    assert not is_on_loopback("auto", {}, tmp_path / "7")
