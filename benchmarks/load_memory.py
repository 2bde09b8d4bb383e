"""What loading a model takes of memory, by the kernel's own count (Linux): one process a dtype, one line each.

    python -m benchmarks.load_memory MODEL [--dtype float32 --dtype bfloat16] [--json]

private  memory that this process has for itself when the model is loaded: the packed weights
mapped   pages of the weights' files that it has open then; every worker of a host uses the same ones
peak     the most that it had of both together while it loaded
All without what the process had before, and with a KV pool of one block.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pdserve import modelstore
from pdserve.clock import SystemClock
from pdserve.errors import PdserveError
from pdserve.modelstore.model_facts import read_facts

CLOCK = SystemClock()
_MEASURE = "--measure"  # in the child
_KIB = 1024
_MB = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadMemory:
    """One load; growth of the process in bytes."""

    dtype: str
    stored_bytes: int
    private_bytes: int
    mapped_bytes: int
    peak_bytes: int
    took_s: float

    def line(self) -> str:
        """Of the table."""
        sizes = (self.stored_bytes, self.private_bytes, self.mapped_bytes, self.peak_bytes)
        return f"{self.dtype:9}" + "".join(f"{size / _MB:10.0f}" for size in sizes) + f"{self.took_s:10.1f}"


def measure(folder: Path, dtype: str) -> LoadMemory:
    """Load in this process, which should do nothing else."""
    from pdserve.engine.torch_runner import TorchRunner

    before = _resident()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    started_s = CLOCK.now_s()
    runner = TorchRunner(  # alive until it has been measured
        folder,
        dtype=dtype,
        deterministic=False,
        num_threads=1,
        num_blocks=1,
        kv_memory_bytes=0,
        block_size=16,
    )
    took_s, after = CLOCK.now_s() - started_s, _resident()
    assert runner.layout.num_blocks == 1
    return LoadMemory(
        dtype=dtype,
        stored_bytes=read_facts(folder).weights_bytes,
        private_bytes=after["RssAnon"] - before["RssAnon"],
        mapped_bytes=after["RssFile"] - before["RssFile"],
        peak_bytes=after["VmHWM"] - before["VmRSS"],
        took_s=took_s,
    )


def measure_apart(model: str | Path, dtype: str) -> LoadMemory:
    """The same in a process of its own. Raises CalledProcessError; its standard error says why."""
    command = [sys.executable, "-m", "benchmarks.load_memory", str(model), "--dtype", dtype, _MEASURE]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return LoadMemory(**json.loads(said))


def _resident() -> dict[str, int]:
    """Bytes by the names of /proc/self/status: VmRSS = RssAnon + RssFile (+ RssShmem), VmHWM its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    pairs = (line.split()[:2] for line in lines if line.startswith(("VmRSS:", "VmHWM:", "Rss")))
    return {name.rstrip(":"): int(kib) * _KIB for name, kib in pairs}


def main(argv: Sequence[str]) -> int:
    """Measure each dtype, print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="fetched alias, Hugging Face folder, or .gguf file")
    parser.add_argument("--dtype", action="append", choices=["auto", "bfloat16", "float32"])
    parser.add_argument("--json", action="store_true")
    parser.add_argument(_MEASURE, action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    dtypes = arguments.dtype or ["float32", "bfloat16"]
    try:
        folder = modelstore.resolve(arguments.model)
        if arguments.measure:
            print(json.dumps(asdict(measure(folder, dtypes[0]))))
            return 0
    except PdserveError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    if not arguments.json:
        print("dtype     stored MB   private    mapped      peak   seconds")
    for dtype in dtypes:
        found = measure_apart(folder, dtype)
        print(json.dumps(asdict(found)) if arguments.json else found.line(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
