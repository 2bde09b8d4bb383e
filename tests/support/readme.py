"""Code blocks and tables of the documentation, as the tests run and compare them."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from pdserve.service.config import SETTINGS
from pdserve.service.settings import shown

ROOT = Path(__file__).resolve().parents[2]
ADDRESS = "127.0.0.1:50051"
HTTP_ADDRESS = "127.0.0.1:8000"
PAGES = ("README.md", "docs/api.md")  # whose commands and examples are run
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    """The contents of all blocks of that language, in order."""
    text = "\n".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
    return [content for found, content in _BLOCK.findall(text) if found == language]


def commands(program: str = "") -> list[str]:
    """The lines of all `sh` blocks that start with that program."""
    lines = [line for block in blocks("sh") for line in block.splitlines() if line.strip()]
    return [line for line in lines if shlex.split(line)[0] == program or not program]


def between(page: str, begin: str, end: str) -> str:
    """What stands between two marks, which are parts of lines of their own."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    first = next(index for index, line in enumerate(lines) if begin in line)
    last = next(index for index, line in enumerate(lines) if end in line)
    return "\n".join(lines[first + 1 : last]) + "\n"


@dataclass(frozen=True)
class Grpcurl:
    """One grpcurl line: a call, or `list`."""

    request: dict[str, object]
    address: str
    what: str

    @classmethod
    def parse(cls, line: str) -> Grpcurl:
        words = shlex.split(line)[1:]
        data = words[words.index("-d") + 1] if "-d" in words else "{}"
        address, what = words[-2:]
        return cls(json.loads(data), address, what)


def markdown_table() -> str:
    """The configuration table of the documentation."""
    lines = ["| key | default | unit | meaning |", "|---|---|---|---|"]
    for key in SETTINGS:
        lines.append(f"| `{key.name}` | `{shown(key.default)}` | {key.spec.unit} | {key.doc} |")
    return "\n".join(lines) + "\n"
