"""Prefill and decode speed beside other engines for CPUs, in one run, on the same weights and threads.

    python -m benchmarks.peers --install openvino --install llama.cpp
    python -m benchmarks.peers [--model smollm2-135m] [--dtype bf16|file] [--threads 2] [--rounds 5]

Each engine is a process in an environment of its own under build/peers; one that isn't installed is left out by name.
They take turns, and those that wait are stopped (SIGSTOP), so that no thread of theirs spins. Ratios are theirs ÷ ours
in seconds, round by round: above 1, ours is faster. With bf16, the weights of the model's file are widened once to 16
bits; with `file` each engine takes the file as it is, quantised.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType

from benchmarks.peers.widened import widened
from pdserve import modelstore

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ENVIRONMENTS = ROOT / "build" / "peers"
START_LIMIT_LINES = 1_000  # of what an engine says before it is ready
CELLS = (
    *({"cell": "prefill", "tokens": tokens} for tokens in (128, 512, 2048)),
    *({"cell": "decode", "context": context, "tokens": 48} for context in (128, 1024)),
)


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine: what is installed for it, the script that drives it, and the 16-bit weights that it reads."""

    requirements: tuple[str, ...]
    script: str
    wide: GGMLQuantizationType = GGMLQuantizationType.BF16


PEERS = {
    "openvino": Peer(("openvino-genai==2026.4.1.0",), "side_openvino.py", GGMLQuantizationType.F16),
    "llama.cpp": Peer(("xllamacpp==2026.10.11549",), "side_llama_cpp.py"),
}


def python_of(name: str) -> Path:
    return ENVIRONMENTS / name / "bin" / "python"


def install(name: str) -> None:
    """An environment with this engine."""
    folder = ENVIRONMENTS / name
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(python_of(name)), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, *PEERS[name].requirements], check=True)


class Side:
    """One engine's process. It works when it is asked to, and is stopped otherwise."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
        )
        self.about = self._read()
        self._process.send_signal(signal.SIGSTOP)

    def seconds(self, cell: dict[str, Any], seed: int) -> float:
        """One round."""
        assert self._process.stdin is not None
        self._process.send_signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps(cell | {"seed": seed}) + "\n")
        self._process.stdin.flush()
        seconds = float(self._read()["seconds"])
        self._process.send_signal(signal.SIGSTOP)
        return seconds

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for _ in range(START_LIMIT_LINES):
            line = self._process.stdout.readline()
            if not line:
                break
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        raise SystemExit(f"{self.name} ended with {self._process.wait()}")


@contextlib.contextmanager
def sides(model: Path, dtype: str, threads: int) -> Iterator[list[Side]]:
    """Ours, then every one that is installed."""
    with contextlib.ExitStack() as stack:
        started: list[Side] = []

        def start(name: str, command: list[str], wide: GGMLQuantizationType) -> None:
            file = model if dtype == "file" else widened(model, ENVIRONMENTS / "models", wide)
            side = Side(name, [*command, str(file), str(threads)])
            stack.callback(side.end)
            started.append(side)
            print(f"# {name}: {side.about.get('about', '')}", flush=True)

        start("pdserve", [sys.executable, "-m", "benchmarks.peers.side_pdserve"], GGMLQuantizationType.BF16)
        for name, peer in PEERS.items():
            if not python_of(name).exists():
                print(f"# {name}: not installed (--install {name})", flush=True)
                continue
            start(name, [str(python_of(name)), str(HERE / peer.script)], peer.wide)
        yield started


def measure(model: Path, dtype: str, threads: int, rounds: int) -> None:
    """Prints a line for each cell and peer."""
    with sides(model, dtype, threads) as (ours, *peers):
        print(f"{'cell':24}{'engine':12}{'tok/s':>8}{'  ratio to ours (spread)':26} n")
        for cell in CELLS:
            name = f"{cell['cell']} {cell.get('context', cell['tokens'])}"
            taken: dict[str, list[float]] = {side.name: [] for side in (ours, *peers)}
            for number in range(rounds + 1):
                turn = [ours, *peers]
                for side in turn if number % 2 else turn[::-1]:
                    seconds = side.seconds(cell, number)
                    if number:  # the first one doesn't count
                        taken[side.name].append(seconds)
            for side in (ours, *peers):
                ratios = sorted(t / o for t, o in zip(taken[side.name], taken[ours.name], strict=True))
                rate = int(cell["tokens"]) / statistics.median(taken[side.name])
                spread = f"{statistics.median(ratios):7.2f} ({ratios[0]:.2f}–{ratios[-1]:.2f})"
                print(f"{name:24}{side.name:12}{rate:8.1f}{spread:26} {rounds}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--install", action="append", choices=list(PEERS), help="and measure nothing")
    parser.add_argument("--model", default="smollm2-135m", help="alias or .gguf file")
    parser.add_argument("--dtype", choices=["bf16", "file"], default="bf16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5, help="after one that doesn't count")
    options = parser.parse_args()
    for name in options.install or ():
        install(name)
    if options.install:
        return
    model = next(modelstore.resolve(options.model).glob("*.gguf"))
    threads, cores, load = options.threads, os.cpu_count(), os.getloadavg()[0]
    print(f"# {options.model}, {options.dtype}, {threads} threads of {cores} cores, load {load:.1f}")
    measure(model, options.dtype, options.threads, options.rounds)


if __name__ == "__main__":
    main()
