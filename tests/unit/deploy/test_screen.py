"""What a terminal shows of a cluster that loads, and what is left of it when that is over."""

from __future__ import annotations

import io
import re

import pytest

from deploy.local.output import PrefixedOutput
from deploy.local.probe import Loaded
from deploy.local.screen import PlainScreen, TerminalScreen


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def texts(self) -> list[str]:
        """What was written since the last look, without control sequences, by non-empty lines."""
        said, _ = self.getvalue(), self.seek(0)
        self.truncate()
        return [line.strip() for line in re.split(r"\x1b\[[0-9;?]*[A-Za-z]|[\r\n]", said) if line.strip()]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    return Terminal()


def test_the_bar_counts_all_workers_together_and_guesses_those_that_say_nothing_yet(
    terminal: Terminal,
) -> None:
    with TerminalScreen(terminal, 9) as screen:
        screen.loading([Loaded(0, 0), Loaded(0, 0)])
        assert all(text.startswith("loading 2 workers") and "MB" not in text for text in terminal.texts())
        screen.loading([Loaded(30_000_000, 100_000_000), Loaded(0, 0)])
        assert any("30 of 200 MB" in text for text in terminal.texts())
        screen.loading([Loaded(100_000_000, 100_000_000), Loaded(60_000_000, 120_000_000)])
        assert any("160 of 220 MB" in text for text in terminal.texts())


def test_lines_stay_and_the_bar_goes(terminal: Terminal, capsys: pytest.CaptureFixture[str]) -> None:
    with TerminalScreen(terminal, 9) as screen:
        screen.loading([Loaded(1_000_000, 2_000_000)])
        screen.line("decode-0", "[warning] 1 of [b]2[/b]")
        assert "decode-0  | [warning] 1 of [b]2[/b]" in terminal.texts()
        screen.tell("decode-0 is ready, in 1.0 s")
        assert "decode-0 is ready, in 1.0 s" in terminal.texts()
        screen.loading(())
        screen.loading(())
        assert "\x1b[?25h" in terminal.getvalue(), "the cursor is shown again"
        terminal.texts()
        screen.say("ready")
        screen.tell("draining")
        assert terminal.texts() == ["draining"]
    assert capsys.readouterr().out == "ready\n"


def test_a_bar_that_is_left_in_the_middle_gives_the_terminal_back(terminal: Terminal) -> None:
    with TerminalScreen(terminal, 9) as screen:
        screen.loading([Loaded(1, 2)])
        assert "\x1b[?25h" not in terminal.getvalue()
    assert "\x1b[?25h" in terminal.getvalue()


def test_the_last_word_of_a_child_is_left_to_the_supervisor(terminal: Terminal) -> None:
    with TerminalScreen(terminal, 9) as screen:
        screen.line("decode-0", "error: no such model")
    assert terminal.texts() == []


def test_without_a_terminal_there_are_lines_only(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    screen = PlainScreen(PrefixedOutput(stream, 9))
    screen.loading([Loaded(1, 2)])
    screen.tell("decode-0 is ready, in 1.0 s")
    screen.say("ready")
    assert stream.getvalue() == "up        | decode-0 is ready, in 1.0 s\n"
    assert capsys.readouterr().out == "ready\n"
