"""What counts as a line of product code."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools.code_lines import code_lines, lines_by_package, package_of

SOURCE = '''"""A module.

Of several lines.
"""

# a comment

import os  # counts


class Thing:
    """Its docstring."""

    text = """
    counts, all four

    lines of it"""

    def one(self) -> int: return 1

    async def many(self) -> None:
        "in one line"
        call(
            1,

            2,
        )
        "a string that is no docstring"
'''


def test_blank_lines_comments_and_docstrings_do_not_count() -> None:
    assert code_lines(SOURCE) == len("import class text:4 one many call 1 2 ) string".split()) + 3
    assert code_lines("") == code_lines('"""Only this."""\n') == 0


@pytest.mark.parametrize(
    ("path", "package"),
    [
        ("router/app.py", "router"),
        ("pdserve/errors.py", "pdserve"),
        ("pdserve/engine/models/llama.py", "pdserve/engine"),
        ("deploy/local/up.py", "deploy"),
        ("pdserve/rpc/v1/session_pb2.py", None),
        ("pdserve/rpc/v1/session_pb2_grpc.py", None),
        ("tests/unit/router/test_queue.py", None),
        ("tools/code_lines.py", None),
        ("benchmarks/engine.py", None),
        ("README.md", None),
    ],
)
def test_a_file_counts_for_its_package_if_it_is_product_code(path: str, package: str | None) -> None:
    assert package_of(path) == package


def test_the_working_tree_and_a_revision_are_counted_alike(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        who = ("-c", "user.name=t", "-c", "user.email=t@t")
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-q")
    for path, text in {
        "router/a b.py": "x = 1\n",
        "pdserve/e/é.py": "x = 1\ny = 2\n",
        "tests/t.py": "x\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    git("add", ".")
    git("commit", "-qm", "x")
    (tmp_path / "router" / "a b.py").write_text("x = 1\n\n# more\nz = 3\n")
    assert lines_by_package(tmp_path) == {"router": 2, "pdserve/e": 2}
    assert lines_by_package(tmp_path, "HEAD") == {"router": 1, "pdserve/e": 2}
    (tmp_path / "router" / "a b.py").unlink()
    assert lines_by_package(tmp_path) == {"pdserve/e": 2}
