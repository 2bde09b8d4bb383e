"""Prefill and decode speed of the engine beside transformers, in one run: only the ratios mean anything.

    python -m benchmarks.engine [--dtype bfloat16 --dtype float32] [--threads 2] [--model smollm2-135m] [--check]

Both sides take turns, so that whatever else the machine does meets both. A decode round is 64 tokens behind 512 tokens
of context for each sequence of the batch; a prefill round is one prompt, in chunks of 512 on our side. The ratio of a
cell is the median over rounds of theirs ÷ ours; the spread is the smallest and the largest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.engine_sides import BLOCK_SIZE, Ours, Side, Theirs, random_prompt
from pdserve import modelstore
from pdserve.clock import SystemClock
from pdserve.errors import PdserveError

CONTEXT = 512
NEW_TOKENS = 64
CHUNK_TOKENS = 512
PREFILLS = {128: 1.0, 512: 1.0, 2048: 1.0}  # prompt tokens: the ratio that is asked for
DECODES = {1: 2.0, 8: 2.5, 32: 2.5}  # batch: the ratio that is asked for
CLOCK = SystemClock()


@dataclass(frozen=True, slots=True)
class Result:
    """One cell of the table; seconds of each round on both sides, in turn."""

    dtype: str
    cell: str
    num_tokens: int
    wanted_ratio: float
    ours_s: list[float]
    theirs_s: list[float]

    @property
    def ratios(self) -> list[float]:
        return [theirs / ours for ours, theirs in zip(self.ours_s, self.theirs_s, strict=True)]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    def line(self) -> str:
        ours, theirs = (self.num_tokens / statistics.median(side) for side in (self.ours_s, self.theirs_s))
        met = "met" if self.ratio >= self.wanted_ratio else "MISSED"
        return (
            f"{self.dtype:9} {self.cell:22} {ours:9.1f} {theirs:9.1f}   {self.ratio:5.2f} "
            f"({min(self.ratios):.2f}–{max(self.ratios):.2f})  {len(self.ratios):2}   ≥ {self.wanted_ratio} {met}"
        )


HEADER = "dtype     cell                  ours tok/s  theirs    ratio (spread)      n   asked"


def take_turns(
    run: Callable[[Side], float], ours: Side, theirs: Side, rounds: int
) -> tuple[list[float], list[float]]:
    """Seconds of each round on both sides; one round of each before them doesn't count."""
    run(ours)
    run(theirs)
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds):
        pair = ((ours, times[0]), (theirs, times[1]))
        for side, seconds in pair if number % 2 == 0 else pair[::-1]:
            seconds.append(run(side))
    return times


def timed(work: Callable[[], object]) -> float:
    start_s = CLOCK.now_s()
    work()
    return CLOCK.now_s() - start_s


def decode_many(side: Side, num_steps: int) -> None:
    for _ in range(num_steps):
        side.decode()


def measure(
    folder: Path, dtype: str, num_threads: int, rounds: int, batches: Sequence[int], new_tokens: int
) -> list[Result]:
    """All cells of one dtype, each printed as it comes."""
    num_blocks = max(max(batches) * (-(-CONTEXT // BLOCK_SIZE) + 8), max(PREFILLS) // BLOCK_SIZE)
    ours = Ours(folder, dtype, num_threads, num_blocks, CHUNK_TOKENS)
    theirs = Theirs(folder, dtype, num_threads)
    print(f"# {dtype}: {ours.runner.card.numerics}", flush=True)
    results: list[Result] = []

    def cell(name: str, num_tokens: int, wanted: float, run: Callable[[Side], float], count: int) -> None:
        results.append(Result(dtype, name, num_tokens, wanted, *take_turns(run, ours, theirs, count)))
        print(results[-1].line(), flush=True)

    seed = 0
    for length, wanted in PREFILLS.items():

        def prefill(side: Side, length: int = length) -> float:
            nonlocal seed
            seed += 1
            prompt = random_prompt(length, ours.runner.card.vocab_size, seed)
            return timed(lambda: side.prefill(prompt))

        cell(
            f"prefill {length}", length, wanted, prefill, rounds if length <= CONTEXT else max(3, rounds // 2)
        )
    for batch in batches:

        def decode(side: Side, batch: int = batch) -> float:
            side.begin(batch, CONTEXT)
            side.decode()
            return timed(lambda: decode_many(side, new_tokens))

        name = f"decode, batch {batch}"
        cell(name, batch * new_tokens, DECODES[batch], decode, max(3, rounds // (1 if batch == 1 else 2)))
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="alias, folder or .gguf file")
    parser.add_argument("--dtype", action="append", choices=["bfloat16", "float32"], help="default: both")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=6, help="turns of each side in the short cells")
    parser.add_argument("--batch", action="append", type=int, choices=list(DECODES), help="default: all")
    parser.add_argument(
        "--new-tokens", type=int, default=NEW_TOKENS, help="of each sequence in a decode round"
    )
    parser.add_argument("--json", type=Path, help="write the results here too")
    parser.add_argument("--check", action="store_true", help="exit 1 if an asked ratio is missed")
    options = parser.parse_args(arguments)
    try:
        folder = modelstore.resolve(options.model)
    except PdserveError as error:
        print(f"{error}\nFetch it first: pdserve fetch {options.model}", file=sys.stderr)
        return 2
    print(HEADER)
    results: list[Result] = []
    for dtype in options.dtype or ["bfloat16", "float32"]:
        batches = options.batch or list(DECODES)
        results += measure(folder, dtype, options.threads, options.rounds, batches, options.new_tokens)
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
    missed = [result for result in results if result.ratio < result.wanted_ratio]
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
