"""Compiles the kernels: for setup.py, and by hand. Needs nothing but `ziglang`, a compiler from PyPI.

    python -m pdserve.engine.native.build [--machine aarch64] [--into FOLDER]

Each variant is one shared library that links nothing, so that any Python 3 on any C library loads it. All are compiled
or none: a CPU must not silently take a lesser variant than its equals elsewhere.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent
_SOURCES = FOLDER / "kernels"
_VARIANTS = {
    "x86_64": {
        "avx2": "x86_64_v3",
        "avx512": "x86_64_v4",
        "avx512-bf16": "x86_64_v4+avx512bf16+avx512vnni",
    },
    "aarch64": {"neon": "generic"},
}
_FLAGS = (
    "-std=gnu23", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-ffreestanding",
    "-nostdlib", "-fvisibility=hidden", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-s",
)  # fmt: skip
_LIMIT_S = 300


def sources() -> list[Path]:
    """What is compiled, headers included."""
    return sorted(_SOURCES.glob("*.[ch]"))


def installed() -> list[str]:
    """Variants whose libraries are there."""
    return sorted(path.stem.removeprefix("kernels-") for path in FOLDER.glob("kernels-*.so"))


def compile_into(folder: Path, machine: str = platform.machine(), limit_s: float = _LIMIT_S) -> str:
    """Put the libraries into a folder, in place of older ones.

    machine  what `uname -m` says where they will run
    limit_s  of a compiler; when it is over, or one has failed, all are killed, and what they have started
    returns  "", or in one line why there are none now
    """
    _remove(folder)
    if sys.platform != "linux" or machine not in _VARIANTS:
        return f"there are none for {sys.platform} on {machine}"
    if importlib.util.find_spec("ziglang") is None:
        return "the package ziglang, which compiles them, is not installed"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": cache, "ZIG_LOCAL_CACHE_DIR": cache}
        running = [
            subprocess.Popen(
                _command(machine, cpu, folder / f"kernels-{name}.so"),
                env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            for name, cpu in _VARIANTS[machine].items()
        ]  # fmt: skip
        try:
            why = next((why for process in running if (why := _failure(process, limit_s))), "")
        finally:
            for process in running:
                _end(process)
    if why:
        _remove(folder)
    return why


def _command(machine: str, cpu: str, library: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "ziglang", "cc", "-target", f"{machine}-linux-gnu", f"-mcpu={cpu}"),
        *(*_FLAGS, "-o", str(library), *(str(path) for path in sources() if path.suffix == ".c")),
    ]


def _failure(process: subprocess.Popen[str], limit_s: float) -> str:
    """Wait for a compiler; what it complains of, in one line."""
    try:
        said, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return f"the compiler took more than {limit_s:g} s"
    if not process.returncode:
        return ""
    errors = [line for line in said.splitlines() if "error" in line]
    return errors[0] if errors else f"the compiler ended with {process.returncode}"


def _end(process: subprocess.Popen[str]) -> None:
    """And what it has started: `ziglang` is a Python process with the compiler as its child."""
    if process.returncode is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _remove(folder: Path) -> None:
    for library in folder.glob("kernels-*.so"):
        library.unlink()


def main() -> int:
    """Exit code 1 where there are none now."""
    parser = argparse.ArgumentParser(prog="python -m pdserve.engine.native.build")
    parser.add_argument("--machine", default=platform.machine(), help="x86_64 or aarch64; default: this one")
    parser.add_argument("--into", type=Path, default=FOLDER, help="default: beside the sources")
    options = parser.parse_args()
    why = compile_into(options.into, options.machine)
    if why:
        sys.stderr.write(f"pdserve: no compiled kernels: {why}\n")
    return 1 if why else 0


if __name__ == "__main__":
    sys.exit(main())
