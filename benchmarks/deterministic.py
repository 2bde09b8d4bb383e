"""What deterministic mode costs: the proof at start, and prefill and decode beside the free form, in turn.

    python -m benchmarks.deterministic [--linear onednn] [--dtype bfloat16] [--rounds 9] [--threads 1]

Seconds are CPU time of this process, so that other processes disturb less; with one thread that is the time of a step.
A decode round is 8 steps behind 512 tokens of context.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time  # noqa: TID251 - CPU time, which no clock of ours has
from collections.abc import Callable, Sequence

from benchmarks.engine import decode_many
from benchmarks.engine_sides import Ours, random_prompt
from pdserve import modelstore
from pdserve.engine.numerics import choose_precision

PREFILL, CONTEXT, STEPS = 512, 512, 8
BATCHES = (1, 4, 8, 16)


def seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def line(name: str, free: Sequence[float], fixed: Sequence[float]) -> str:
    sides = (
        f"{statistics.median(side) * 1e3:8.1f} ({min(side) * 1e3:.1f}–{max(side) * 1e3:.1f})"
        for side in (free, fixed)
    )
    return f"{name:20} {' '.join(sides)}   {statistics.median(fixed) / statistics.median(free):5.2f}   n = {len(free)}"


def decode(side: Ours, batch: int) -> float:
    side.begin(batch, CONTEXT)
    side.decode()
    return seconds(lambda: decode_many(side, STEPS)) / STEPS


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.deterministic", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--model", default="smollm2-135m", help="alias, folder or .gguf file")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--linear", default="auto", choices=["auto", "onednn", "fbgemm-half", "plain"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args(arguments)
    folder = modelstore.resolve(options.model)
    precision = choose_precision(options.dtype, options.linear)
    starts: list[float] = []
    sides: list[Ours] = []
    for deterministic in (False, True):

        def make(deterministic: bool = deterministic) -> None:
            num_blocks = max(BATCHES) * (CONTEXT // 16 + 8)
            sides.append(
                Ours(
                    folder,
                    options.dtype,
                    options.threads,
                    num_blocks,
                    PREFILL,
                    deterministic=deterministic,
                    precision=precision,
                )
            )

        starts.append(seconds(make))
    print(f"# {sides[1].runner.card.numerics}")
    print(f"load: free {starts[0]:.1f} s, deterministic {starts[1]:.1f} s")
    print("ms                       free           deterministic      ratio")
    prompt = random_prompt(PREFILL, sides[0].runner.card.vocab_size, 1)
    cells: dict[str, Callable[[Ours], float]] = {
        "prefill 512": lambda side: seconds(lambda: side.prefill(prompt))
    }
    for batch in BATCHES:
        cells[f"decode, batch {batch}"] = lambda side, batch=batch: decode(side, batch)  # type: ignore[misc]
    for name, cell in cells.items():
        for side in sides:
            cell(side)
        rounds = [[cell(side) for side in sides] for _ in range(options.rounds)]
        print(line(name, *zip(*rounds, strict=True)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
