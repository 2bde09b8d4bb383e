"""One decoder under libFuzzer, guided by the lines that are reached: `python -m tests.fuzz.guided NAME CORPUS -flag=…`.

A child of `tests.fuzz`: libFuzzer ends its process.
"""

from __future__ import annotations

import sys

import atheris  # type: ignore[import-untyped,import-not-found,unused-ignore]

with atheris.instrument_imports(include=["pdserve", "kv_transfer", "router"]):
    from tests.fuzz.decoders import DECODERS, ends_well


def main() -> None:
    name, *flags = sys.argv[1:]
    decoder = DECODERS[name]
    atheris.Setup([sys.argv[0], *flags], lambda data: ends_well(decoder, data), enable_python_coverage=True)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
