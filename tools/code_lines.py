"""Lines of product code by package: without blank lines, comments, docstrings, generated code and tests.

    tools/code_lines.py [REVISION]     of the working tree, or of a revision; anywhere in the repository

A line counts if some token of code stands on it, all lines of a string in several lines included.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

NOT_PRODUCT = ("tests", "benchmarks", "tools", "scripts", "docs")
_LAYOUT = frozenset(
    (
        tokenize.ENCODING,
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    )
)


def code_lines(source: str) -> int:
    """Of one file. Raises SyntaxError if it isn't Python."""
    counted: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _LAYOUT:
            counted.update(range(token.start[0], token.end[0] + 1))
    for docstring in _docstrings(ast.parse(source)):
        counted.difference_update(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    return len(counted)


def _docstrings(tree: ast.Module) -> Iterator[ast.stmt]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            yield node.body[0]


def package_of(path: str) -> str | None:
    """The package that a file counts for: a top-level folder, or one below pdserve; None: it isn't product code."""
    parts = PurePosixPath(path).parts
    if not path.endswith(".py") or "_pb2" in path or (len(parts) > 1 and parts[0] in NOT_PRODUCT):
        return None
    return "/".join(parts[:2]) if parts[0] == "pdserve" and len(parts) > 2 else parts[0]


def lines_by_package(root: Path, revision: str | None = None) -> Counter[str]:
    """Of all files that git knows and that are there."""
    found: Counter[str] = Counter()
    listed = ("ls-files", "-z") if revision is None else ("ls-tree", "-r", "-z", "--name-only", revision)
    for path in _git(root, *listed).split("\0"):
        package = package_of(path)
        if package is None or (revision is None and not (root / path).exists()):
            continue
        source = (root / path).read_text() if revision is None else _git(root, "show", f"{revision}:{path}")
        found[package] += code_lines(source)
    return found


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout


def main(arguments: list[str]) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("revision", nargs="?")
    lines = lines_by_package(Path(__file__).resolve().parents[1], parser.parse_args(arguments).revision)
    for package, count in sorted(lines.items()):
        print(f"{count:7,}  {package}")
    print(f"{lines.total():7,}  in all")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
