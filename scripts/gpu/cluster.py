"""Clusters by `pdserve bench --compare`: worst gap and time to first token under long prompts, P/D against both."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from scripts.gpu.model import LARGE, SMALL, random_llama
from scripts.gpu.place import GpuPlace

_GAP_MS = 100


def check_cluster(place: GpuPlace, kind: str) -> dict[str, Any]:
    """Raises CalledProcessError with the output in the log."""
    folder = random_llama(place.folder, SMALL if place.is_dry else LARGE)
    config = place.folder / "cluster.toml"
    config.write_text(_config(place, kind))
    out = place.folder / "cluster.json"
    sizes = ("256", "16", "4", "6") if place.is_dry else ("8000", "128", "2", "40")
    names = ("--prompt-tokens", "--output-tokens", "--rate", "--requests")
    program = "import sys; from pdserve.cli.main import main; sys.exit(main(sys.argv[1:]))"
    clusters = (
        "--model",
        str(folder),
        "--prefill",
        "1",
        "--decode",
        "1",
        "--both",
        "1",
        "--config",
        str(config),
    )
    load = [word for pair in zip(names, sizes) for word in pair]
    line = [
        *(sys.executable, "-c", program, "bench", "--compare", *clusters, *load),
        *("--rounds", "1", "--slo-gap-ms", str(_GAP_MS), "--json", str(out)),
    ]
    subprocess.run(line, check=True, cwd=place.folder)
    found: dict[str, Any] = json.loads(out.read_text())
    return _summed_up(found)


def _config(place: GpuPlace, kind: str) -> str:
    if place.is_dry:
        return f'[transport]\nkinds = ["{kind}", "stream"]\nstrict = true\n[engine]\nnum_blocks = 256\n'
    return (  # the three workers of both clusters take turns, two at once
        f'[transport]\nkinds = ["{kind}"]\nstrict = true\n'
        f'[engine]\ndevice = "{place.device(place.decode)}"\ngpu_memory_utilization = 0.4\n'
    )


def _summed_up(found: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds of each run. Raises AssertionError if a request failed."""
    runs = {}
    for run in found["runs"]:
        assert run["num_ok"] == run["num_sent"] > 0, (run["name"], run["codes"])
        measured = {name: run["measured"][name] for name in ("ttft", "gap", "worst gap of a request")}
        runs[run["name"]] = {
            "requests": run["num_ok"],
            "output_tokens_per_s": run["rates"]["output_tokens"],
            **measured,
        }
    return {"verdict": found["verdict"], "runs": runs}
