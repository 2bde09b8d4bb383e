"""Mutates what every decoder reads, for a while: `make fuzz`.

Each decoder has its share of the time, in a process of its own. What it ended on badly is left in build/fuzz/NAME, with
the command that shows it again; a finding belongs into tests/fuzz/corpus once it is mended, where `make test` reads it.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

from tests.fuzz.decoders import DECODERS

HERE = Path(__file__).parent
BUILD = Path("build/fuzz")
_RUNS = re.compile(r"^#(\d+)\s", re.MULTILINE)
LONGEST_BYTES = 4096
SLOWEST_S, LARGEST_MB = 5, 2048  # one input may take so long, and the process be so large


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=int, default=150, help="in all (default 150)")
    parser.add_argument("--decoder", action="append", choices=DECODERS, help="only these; repeatable")
    arguments = parser.parse_args()
    if importlib.util.find_spec("atheris") is None:
        print("error: the fuzzer isn't installed: pip install atheris", file=sys.stderr)
        return 2
    names = arguments.decoder or list(DECODERS)
    found = [name for name in names if not fuzz(name, max(1, arguments.seconds // len(names)))]
    print(
        f"{len(found)} of {len(names)} decoders ended badly: {', '.join(found)}" if found else "nothing found"
    )
    return 1 if found else 0


def fuzz(name: str, seconds: int) -> bool:
    """Whether nothing was found."""
    corpus, kept = BUILD / name / "corpus", HERE / "corpus" / name
    corpus.mkdir(parents=True, exist_ok=True)
    for index, seed in enumerate(DECODERS[name].seeds()):
        (corpus / f"seed-{index}").write_bytes(seed)
    command = [
        *(
            sys.executable,
            "-m",
            "tests.fuzz.guided",
            name,
            str(corpus),
            *([str(kept)] if kept.is_dir() else ()),
        ),
        *(f"-max_total_time={seconds}", f"-max_len={LONGEST_BYTES}", f"-timeout={SLOWEST_S}"),
        *(f"-rss_limit_mb={LARGEST_MB}", f"-artifact_prefix={BUILD / name}/", "-print_final_stats=1"),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    counts = [int(count) for count in _RUNS.findall(ended.stderr)]
    print(f"{name}: {max(counts, default=0):,} inputs in {seconds} s", flush=True)
    if ended.returncode:
        print(ended.stdout[-3000:] + ended.stderr[-3000:], file=sys.stderr)
    return ended.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
