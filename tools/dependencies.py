"""What pdserve needs, as pip's requirements: for images, which are made in layers.

python dependencies.py [--only EXTRA] [--without NAME]… [--with REQUIREMENT]…     beside pyproject.toml
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from pathlib import Path


def dependencies(pyproject: str, without: list[str], only: str = "") -> list[str]:
    """Those of the package, or only those of an extra, without the named ones.

    Raises ValueError for a name that isn't there.
    """
    project = tomllib.loads(pyproject)["project"]
    extras = project.get("optional-dependencies", {})
    if only and only not in extras:
        raise ValueError(f"not an extra: {only}")
    found = extras[only] if only else project["dependencies"]
    names = {re.split(r"[^A-Za-z0-9_.-]", each)[0]: each for each in found}
    if unknown := set(without) - set(names):
        raise ValueError(f"not a dependency: {', '.join(sorted(unknown))}")
    return [each for name, each in names.items() if name not in without]


def main() -> int:
    """Print them, one a line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", metavar="EXTRA")
    parser.add_argument("--without", action="append", default=[], metavar="NAME")
    parser.add_argument("--with", action="append", default=[], metavar="REQUIREMENT", dest="more")
    arguments = parser.parse_args()
    text = Path("pyproject.toml").read_text(encoding="utf-8")
    print("\n".join([*dependencies(text, arguments.without, arguments.only), *arguments.more]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
