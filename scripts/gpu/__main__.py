"""One step in this process: `python -m scripts.gpu environment|kernels|engine|speed|links|cluster|ranks …`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.gpu.place import GpuPlace


def main(arguments: Sequence[str]) -> int:
    """Writes what was found; raises where something isn't as it must be."""
    parser = argparse.ArgumentParser("scripts.gpu", description=__doc__)
    parser.add_argument(
        "step", choices=("environment", "kernels", "engine", "speed", "links", "cluster", "ranks")
    )
    parser.add_argument(
        "--kind", choices=("cuda_ipc", "nccl", "stream"), default="cuda_ipc", help="of links and cluster"
    )
    parser.add_argument("--on-cpu", choices=("p", "d"), default="", help="links: whose pool lies there")
    parser.add_argument("--gpus", default="0,0", metavar="P,D", help="numbers of the GPUs of both workers")
    parser.add_argument("--folder", type=Path, required=True, help="for files that later steps use, too")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args(arguments)
    prefill, decode = (int(number) for number in options.gpus.split(","))
    place = GpuPlace(prefill, decode, options.folder, is_dry=options.dry_run)
    match options.step:  # imported here: each needs other libraries, and a step must not fail for another's
        case "environment":
            from scripts.gpu.environment import look

            found = look(place)
        case "kernels":
            from scripts.gpu.kernels import check_kernels

            found = check_kernels(place)
        case "engine":
            from scripts.gpu.engine import check_engine

            found = check_engine(place)
        case "speed":
            from scripts.gpu.engine import measure_speed

            found = measure_speed(place)
        case "links":
            from scripts.gpu.links import check_links

            found = check_links(place, options.kind, options.on_cpu)
        case "ranks":
            from scripts.gpu.ranks import check_ranks

            found = check_ranks(place)
        case _:
            from scripts.gpu.cluster import check_cluster

            found = check_cluster(place, options.kind)
    options.out.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
