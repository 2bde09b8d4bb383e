"""`pdserve ray` as far as it goes without Ray; on Ray: tests/integration/ray."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from importlib.util import find_spec

import pytest

from pdserve.cli.main import build_parser, main
from tests.support.readme import ROOT

NEEDS_RAY = pytest.mark.skipif(find_spec("ray") is None, reason="Ray, an extra, isn't installed")
PAGES = (ROOT / "docs/deploy-ray.md", ROOT / "docs/scaling.md")


def documented() -> list[str]:
    """The `pdserve` commands of the pages, without what is said beside them."""
    text = "\n".join(page.read_text("utf-8") for page in PAGES)
    blocks = "\n".join(re.findall(r"^```\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL))
    lines = blocks.replace("\\\n", " ").splitlines()
    return [line.split("  (")[0].strip() for line in lines if line.startswith("pdserve ")]


def test_the_pages_show_every_action() -> None:
    assert {line.split()[2] for line in documented() if line.startswith("pdserve ray")} == {
        "up", "scale", "status", "down",
    }  # fmt: skip


@pytest.mark.parametrize("line", documented())
def test_a_documented_command_is_one(line: str) -> None:
    _, *arguments = shlex.split(line)
    build_parser(arguments).parse_args(arguments)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("status --name a/b", "--name must be"),
        ("down --address local", "give the address that it has printed"),
        ("up --engine fake --engine.kind torch", "contradicts"),
        # What is wrong with the numbers is said before any Ray is looked for.
        ("up --engine fake --decode 0", "no worker would decode: give --decode or --both"),
        ("up --engine fake --decode 3..1", "--decode: the range 3..1 ends below its start"),
        ("up --engine fake --routers 1..2", "--routers: want a number"),
        ("up --engine fake --both 1..2", "--both: want a number"),
        ("up --engine fake --both 1 --decode 1..2", "--both can't stand beside a range"),
        ("up --engine fake --decode 2000", "beyond 1024, the most workers of a role"),
        ("up --engine fake --prefill-resources CPU", "--prefill-resources: want NAME=NUMBER"),
        ("up --engine fake --wait-s nan", "--wait-s: want a number above 0, got nan"),
        ("up", "no model: give --model"),
        ("scale", "scale to what? give one of --routers, --prefill, --decode, --both"),
        ("scale --decode 2 --wait-s -1", "--wait-s: want a number above 0"),
        pytest.param(
            "scale --address 127.0.0.1:1 --decode 2",
            "no Ray cluster can be joined (address=127.0.0.1:1",
            marks=NEEDS_RAY,
        ),
        pytest.param("status --address ray://head:10001", "want auto, local, or HOST:PORT", marks=NEEDS_RAY),
        pytest.param("status --address nowhere", "HOST:PORT", marks=NEEDS_RAY),
    ],
)
def test_a_mistake_is_said_in_a_line(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ray", *line.split()]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    assert said in err


def test_without_the_extra_it_says_what_to_install() -> None:
    """In a process of its own, in which Ray can't be found."""
    code = "import sys; sys.modules['ray'] = None; from pdserve.cli.main import main; sys.exit(main(['ray', 'status']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 1
    assert done.stderr == "error: `pdserve ray` needs Ray: pip install 'pdserve[ray]'\n"
