"""`pdserve chat` in a terminal: a pasted text is one message, as readline gives it."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.unit.cli.scripted_router import ScriptedRouter

PASTED = "if x:\n    y()\n"


@pytest.fixture
def router() -> Iterator[ScriptedRouter]:
    with ScriptedRouter() as started:
        yield started


class Screen:
    """What a program has written to its terminal and nobody has looked at yet."""

    def __init__(self, terminal: int) -> None:
        self._terminal = terminal
        self._shown = b""

    def until(self, text: str) -> str:
        """What comes next, up to and with this text. A test that waits for ever is cut by the runner's limit."""
        wanted = text.encode()
        while wanted not in self._shown:
            self._shown += os.read(self._terminal, 4096)
        found, _, self._shown = self._shown.partition(wanted)
        return (found + wanted).decode(errors="replace")


def test_a_paste_is_one_message(router: ScriptedRouter) -> None:
    readline = pytest.importorskip("readline")
    if "libedit" in (readline.__doc__ or ""):
        pytest.skip("this Python's line editor knows no bracketed paste")
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "pdserve.cli", "chat", "--target", router.target]
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm"}
    ):
        os.close(theirs)
        screen = Screen(ours)
        greeting = screen.until("> ")
        assert "m, up to 64 tokens" in greeting and "/reset" in greeting
        os.write(ours, f"\x1b[200~{PASTED}\x1b[201~".encode())
        screen.until("y()")
        os.write(ours, b"\r")
        assert "of 64 tokens)" in screen.until("tokens)")
        screen.until("> ")
        os.write(ours, b"/quit\r")
    os.close(ours)
    (request,) = router.requests
    assert [message.content for message in request.chat.messages] == [PASTED.rstrip()]
