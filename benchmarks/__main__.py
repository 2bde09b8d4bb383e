"""All benchmarks that compare in turns, one after the other, in about 20 minutes: `make bench`.

    python -m benchmarks [--only NAME …] [--list]

Each part is a module of its own, which says with --help what it measures and takes more rounds. Engines that aren't
installed are left out by name: `python -m benchmarks.peers --install NAME` first.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from dataclasses import dataclass

from benchmarks.turns import machine, worker_environ
from pdserve.clock import SystemClock

CLOCK = SystemClock()


@dataclass(frozen=True, slots=True)
class Part:
    """limit_s: a part that takes longer is ended, so that the others get their time."""

    command: str
    limit_s: float


PARTS = {
    "engine": Part("peers --rounds 3", 420),
    "kernels": Part("kernels --rounds 3", 120),
    "quantised": Part("peers --dtype file --rounds 3 --cell prefill-512 --cell decode-128", 120),
    "transfer": Part("transfer --rounds 7", 90),
    "router": Part("http_door --rounds 1", 90),
    "growth": Part("growth --rounds 3", 60),
    "serving": Part("serving --rounds 2 --part streams --part ttft", 420),
    "interference": Part("serving --rounds 1 --part interference", 240),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", choices=list(PARTS), help="these parts (default: all)")
    parser.add_argument("--list", action="store_true", help="the commands, and run nothing")
    options = parser.parse_args()
    if options.list:
        for name, part in PARTS.items():
            print(f"{name:14} python -m benchmarks.{part.command}")
        return 0
    print(f"# {machine()}", flush=True)
    failed = [name for name in options.only or PARTS if not run(name, PARTS[name])]
    if failed:
        print(f"# failed: {', '.join(failed)}")
    return 1 if failed else 0


def run(name: str, part: Part) -> bool:
    """One part, its output passed on. Whether it ended well and in time."""
    module, *flags = part.command.split()
    print(f"\n== {name}: python -m benchmarks.{part.command}", flush=True)
    begin_s = CLOCK.now_s()
    process = subprocess.Popen(
        [sys.executable, "-m", f"benchmarks.{module}", *flags],
        env=worker_environ(),
        start_new_session=True,
    )
    try:
        code = process.wait(part.limit_s)
    except subprocess.TimeoutExpired:
        code = end(process)
        print(f"# {name}: ended after {part.limit_s:.0f} s", flush=True)
    finally:
        end(process)
    print(f"# {name}: {CLOCK.now_s() - begin_s:.0f} s", flush=True)
    return code == 0


def end(process: subprocess.Popen[bytes]) -> int:
    """Returns its exit code."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)  # it ends what it has started
    try:
        return process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


if __name__ == "__main__":
    sys.exit(main())
