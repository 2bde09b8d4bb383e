"""The engine by compiled kernels beside the engine by torch's, in turns on one thread: what the kernels are worth.

    GLIBC_TUNABLES=glibc.malloc.hugetlb=1 python -m benchmarks.kernels [--variant avx2] [--rounds 9] [--model M]

Seconds are CPU time of this thread, so that other processes disturb less. The ratio of a cell is the median over rounds
of torch's ÷ ours, the spread the smallest and the largest.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time  # noqa: TID251 - CPU time, which no clock of ours has
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.engine_sides import BLOCK_SIZE, Ours, random_prompt
from pdserve import modelstore
from pdserve.engine.native.scan import NativeScan
from pdserve.engine.numerics import choose_precision
from pdserve.engine.port import SampleSpec
from pdserve.engine.row_scan import TORCH_SCAN, RowScan
from pdserve.engine.sampler import sample
from pdserve.sampling import SampleKey, SamplingParams

DECODES = ((1, 128), (1, 1024), (8, 128), (32, 128))  # sequences, context
PREFILLS = (128, 512, 2048)
CHUNK_TOKENS = 512
BATCHES = (1, 8, 32)
VOCABULARIES = (49_152, 151_936)
SAMPLERS = {"greedy": SamplingParams(temperature=0), "top-k 40": SamplingParams(top_k=40)}


def seconds(work: Callable[[], object]) -> float:
    start = time.thread_time()
    work()
    return time.thread_time() - start


def line(name: str, ours: Sequence[float], theirs: Sequence[float]) -> str:
    ratios = [there / here for here, there in zip(ours, theirs, strict=True)]
    middle = "".join(f"{statistics.median(side) * 1e3:10.2f}" for side in (ours, theirs))
    spread = f"({min(ratios):.2f}–{max(ratios):.2f})"
    return f"{name:26}{middle}   {statistics.median(ratios):5.2f} {spread}   n = {len(ratios)}"


def sampling_cell(name: str, params: SamplingParams, logits: Tensor, native: RowScan, rounds: int) -> None:
    """A step's sampling."""
    specs = [
        SampleSpec(SampleKey(params=params, seed=row, choice=0, eos_token_ids=(), max_tokens=1), (1,), 1)
        for row in range(len(logits))
    ]

    def timed(scan: RowScan) -> float:
        return seconds(lambda: sample(logits, specs, scan))

    pairs = [(timed(native), timed(TORCH_SCAN)) for _ in range(rounds + 1)]
    print(line(name, *zip(*pairs[1:], strict=True)), flush=True)


def sampling_cells(native: RowScan, rounds: int) -> None:
    for vocab_size in VOCABULARIES:
        for name, params in SAMPLERS.items():
            for batch in BATCHES:
                logits = 3 * torch.randn(batch, vocab_size, generator=torch.Generator().manual_seed(batch))
                sampling_cell(f"{name}, {batch} × {vocab_size}", params, logits, native, rounds)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="alias, folder or .gguf file")
    parser.add_argument("--variant", default="auto", help="of the compiled kernels")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args(arguments)
    folder = modelstore.resolve(options.model)
    num_blocks = max(
        max(batch * (context // BLOCK_SIZE + 8) for batch, context in DECODES), max(PREFILLS) // BLOCK_SIZE
    )
    precisions = (
        choose_precision("bfloat16", kernels="native", variant=options.variant),
        choose_precision("bfloat16", kernels="torch"),
    )
    ours, theirs = (
        Ours(folder, "bfloat16", 1, num_blocks, CHUNK_TOKENS, precision=precision) for precision in precisions
    )
    for side in (ours, theirs):
        print(f"# {side.runner.card.numerics}")
    print("ms of CPU time              native     torch   ratio (spread)")

    def cell(name: str, run: Callable[[Ours], object], rounds: int) -> None:
        run(ours), run(theirs)
        pairs = [(seconds(lambda: run(ours)), seconds(lambda: run(theirs))) for _ in range(rounds)]
        print(line(name, *zip(*pairs, strict=True)), flush=True)

    assert precisions[0].kernels is not None
    sampling_cells(NativeScan(precisions[0].kernels), options.rounds)
    for batch, context in DECODES:
        for side in (ours, theirs):
            side.begin(batch, context)
        cell(f"decode {batch} behind {context}", Ours.decode, options.rounds)
    for length in PREFILLS:
        prompt = random_prompt(length, ours.runner.card.vocab_size, length)

        def prefill(side: Ours, prompt: Sequence[int] = prompt) -> None:
            side.prefill(prompt)

        cell(f"prefill {length}", prefill, max(3, options.rounds // 3))
    return 0


if __name__ == "__main__":
    sys.exit(main())
