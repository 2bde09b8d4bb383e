"""Rules of this repository that no linter has: `make check` runs it.

    tools/house_rules.py     anywhere in the repository

- A public class has a name of its own: a reader who sees it knows which one is meant, without looking at the imports.
- No file of code is longer than MAX_LINES, tests included: a longer one holds two ideas.

Generated code is left out.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

MAX_LINES = 450
NOT_PRODUCT = ("tests/", "benchmarks/", "tools/")
_SUFFIXES = (".py", ".proto", ".sh")
_GENERATED = "_pb2"


def same_names(sources: Mapping[str, str]) -> Iterator[str]:
    """A line for each name of several public classes of the product. sources: path → text."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path, source in sources.items():
        if path.endswith(".py") and not path.startswith(NOT_PRODUCT):
            for node in ast.parse(source).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places[node.name].append(f"{path}:{node.lineno}")
    for name, found in sorted(places.items()):
        if len(found) > 1:
            yield f"class {name} stands more than once: {', '.join(found)}"


def too_long(sources: Mapping[str, str]) -> Iterator[str]:
    """A line for each file of more than MAX_LINES."""
    for path, source in sorted(sources.items()):
        num_lines = source.count("\n")
        if num_lines > MAX_LINES:
            yield f"{path} has {num_lines} lines, more than {MAX_LINES}"


def sources_of(root: Path) -> dict[str, str]:
    """All code that git knows, or would add, and that is there, by path; not what is generated."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root, capture_output=True, text=True, check=True,
    )  # fmt: skip
    paths = [
        path for path in listed.stdout.split("\0") if path.endswith(_SUFFIXES) and _GENERATED not in path
    ]
    return {path: (root / path).read_text("utf-8") for path in paths if (root / path).is_file()}


def main() -> int:
    """Print what breaks a rule; 1 if anything does."""
    sources = sources_of(Path(__file__).resolve().parents[1])
    broken = [*same_names(sources), *too_long(sources)]
    for line in broken:
        print(line)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
