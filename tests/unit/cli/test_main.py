"""Help, wrong usage and errors of the command line: one line, a code, and a light start."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.cli.main import build_parser, main

COMMANDS = (
    "fetch",
    "up",
    "generate",
    "chat",
    "status",
    "model",
    "router",
    "prefill",
    "decode",
    "worker",
    "version",
)


def failed(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 1) -> str:
    """The one line on standard error of a command that must fail."""
    assert main(argv, {}) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"], {}) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"usage: pdserve {command}")
    assert "-h, --help" in said


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([], {}) == 2
    said = capsys.readouterr().out
    assert all(f"  {command} " in said for command in COMMANDS)
    assert main(["--help"], {}) == 0
    assert capsys.readouterr().out == said


@pytest.mark.parametrize("command", ["router", "prefill", "decode", "worker"])
def test_every_setting_is_a_flag(command: str) -> None:
    parsed = build_parser([command]).parse_args([command, "--timeouts.link-s", "4.5", "--config", "x.toml"])
    assert vars(parsed)["timeouts.link_s"] == "4.5"
    assert parsed.config == Path("x.toml")


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["nonsense"], "nonsense"),
        (["fetch", "--nonsense"], "--nonsense"),
        (["fetch", "--cache"], "--cache"),  # no abbreviations: they break when flags are added
        (["generate", "--max-tokens", "many", "x"], "--max-tokens"),
        (["model", "nonsense", "x"], "nonsense"),
    ],
)
def test_wrong_usage(argv: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = failed(capsys, *argv, code=2)
    assert named in said
    assert "--help" in said


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["fetch", "nonsense"], "smollm2-135m"),
        (["model", "inspect", "/no/such/folder"], "/no/such/folder"),
        (["router", "--listen", "nowhere"], "HOST:PORT"),
        (["router", "--config", "/no/such.toml"], "/no/such.toml"),
        (["router", "--timeouts.link-s", "9"], "link"),
        (["router", "--listen", "h:1", "--router.listen", "h:2"], "contradicts"),
        (["prefill"], "--model"),
        (["decode", "--dtype", "int3"], "bfloat16"),
        (["worker", "--worker.role", "cook"], "prefill"),
        (["worker", "--engine", "fake", "--threads", "some"], "threads"),
    ],
)
def test_errors_are_one_line_that_says_what_to_do(
    argv: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    serves = argv[0] in ("router", "prefill", "decode", "worker")  # 2: another start would change nothing
    assert named in failed(capsys, *argv, code=2 if serves else 1)


def test_a_traceback_only_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fetch", "nonsense"], {"PDSERVE_DEBUG": "1"}) == 1
    assert "Traceback" in capsys.readouterr().err
    assert main(["fetch", "nonsense"], {"PDSERVE_DEBUG": "0"}) == 1
    assert "Traceback" not in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"], {}) == 0
    assert capsys.readouterr().out.startswith("pdserve 0.")


def test_fetch_without_a_name_lists_what_it_knows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fetch", "--cache-dir", str(tmp_path)], {}) == 0
    said = capsys.readouterr().out
    assert "smollm2-135m" in said
    assert "not fetched" in said


def run(*argv: str, script: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *(["-c", script] if script else ["-m", "pdserve.cli"]), *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    "argv", [["--help"], ["version"], ["fetch"], ["generate", "--help"], ["up", "--help"]]
)
def test_the_start_is_light(argv: list[str]) -> None:
    script = (
        "import json, sys; from pdserve.cli.main import main; main(sys.argv[1:]);"
        "sys.stderr.write(json.dumps(sorted(sys.modules)))"
    )
    modules = json.loads(run(*argv, script=script).stderr)
    assert not {"torch", "numpy", "transformers", "gguf", "grpc", "jinja2", "tokenizers"}.intersection(
        modules
    )


def test_the_end_is_light_too() -> None:
    """The interpreter looks for cycles on its way out; what `console` has frozen is left out of that."""
    script = "import gc, sys; from pdserve.cli.main import console; console(); print(gc.get_freeze_count())"
    assert int(run("version", script=script).stdout.split()[-1]) > 10_000


def test_a_reader_that_leaves_is_no_error() -> None:
    command = f"{sys.executable} -m pdserve.cli router --help | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.startswith("usage: pdserve router")
    assert done.stderr == ""


def test_as_a_module_and_with_its_exit_code() -> None:
    done = run("model", "inspect", "no-such-model")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: no model 'no-such-model'")


@pytest.mark.parametrize(
    ("typed", "near"), [("stats", "status"), ("gnerate", "generate"), ("fletch", "fetch")]
)
def test_a_command_that_was_nearly_right(typed: str, near: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = failed(capsys, typed, "--x", code=2)
    assert said == f"error: there is no command '{typed}': did you mean {near}? (see `pdserve --help`)\n"


def test_a_command_that_is_like_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no command 'xyzzy' (see" in failed(capsys, "xyzzy", code=2)
