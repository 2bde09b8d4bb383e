"""What grows with what: a decode step with its context, the engine around the model with its batch.

    python -m benchmarks.growth [--rounds 5] [--threads 1] [--model smollm2-135m]

context  ms of a decode step of one sequence behind 128 to 8,000 tokens, CPU time of the calling thread
batch    µs of a step that the scheduler, the pool and the events take, by the number of sequences: the runner computes
         nothing. bytes: the most that Python holds for the time of one step, and what is left of it a token later
"""

from __future__ import annotations

import argparse
import statistics
import tracemalloc
from collections.abc import Sequence as Seq

from benchmarks.engine_sides import BLOCK_SIZE, GREEDY, Ours
from benchmarks.turns import machine, spread
from pdserve import modelstore
from pdserve.clock import SystemClock, thread_cpu_s
from pdserve.engine.engine import Engine
from pdserve.engine.layout import KvLayout
from pdserve.engine.port import ModelCard, Row, RowOutput
from pdserve.engine.scheduler import EngineLimits
from pdserve.engine.sequence import Sequence
from pdserve.kv_memory import HostMemory, KvMemory

CONTEXTS = (128, 512, 1024, 2048, 4096, 8000)
BATCHES = (1, 8, 32, 64, 256)
STEPS = 16


class NullRunner:
    """Samples the same token whatever comes; implements `Runner`."""

    def __init__(self, card: ModelCard, layout: KvLayout) -> None:
        self.card = card
        self.layout = layout
        self.pool: KvMemory = HostMemory(layout.block_bytes)
        self._output = RowOutput(7)

    def run(self, rows: Seq[Row]) -> list[RowOutput]:
        return [self._output if row.sample else RowOutput() for row in rows]


def by_context(ours: Ours, rounds: int) -> None:
    """A line for each length."""
    for context in CONTEXTS:
        each: list[float] = []
        for number in range(rounds + 1):
            ours.begin(1, context)
            ours.decode()
            begin_s = thread_cpu_s()
            for _ in range(STEPS):
                ours.decode()
            if number:
                each.append((thread_cpu_s() - begin_s) / STEPS * 1e3)
        print(f"decode step behind {context:6,} {spread(each):>22} ms   n {rounds}", flush=True)


def by_batch(card: ModelCard, layout: KvLayout, rounds: int) -> None:
    """A line for each number of sequences."""
    for batch in BATCHES:
        engine = Engine(
            NullRunner(card, layout), EngineLimits(max_batch=batch, prefix_cache=False), SystemClock()
        )
        for number in range(batch):
            ids = [number + 10] * 32
            seq = Sequence(handle=number, session_id=0, ids=ids, num_prompt_tokens=32, key=GREEDY)
            assert engine.reserve_prefill(seq, then_decode=True)
            engine.start_prefill(seq, then_decode=True)
        while any(seq.num_uncomputed > 1 for seq in engine.sequences):
            engine.step()
        each: list[float] = []
        for number in range(rounds + 1):
            begin_s = thread_cpu_s()
            for _ in range(STEPS):
                engine.step()
            if number:
                each.append((thread_cpu_s() - begin_s) / STEPS * 1e6)
        most, left = _held(engine)
        print(
            f"step of {batch:4} without a model {spread(each):>26} µs, {statistics.median(each) / batch:5.1f} a row"
            f"   {most:8,.0f} bytes for its time, {left:6,.1f} left   n {rounds}",
            flush=True,
        )


def _held(engine: Engine) -> tuple[float, float]:
    tracemalloc.start()
    try:
        engine.step()
        before, most = tracemalloc.get_traced_memory()[0], 0
        for _ in range(STEPS):
            tracemalloc.reset_peak()
            now = tracemalloc.get_traced_memory()[0]
            engine.step()
            most = max(most, tracemalloc.get_traced_memory()[1] - now)
        return most, (tracemalloc.get_traced_memory()[0] - before) / STEPS
    finally:
        tracemalloc.stop()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m", help="alias, folder or .gguf file")
    parser.add_argument("--rounds", type=int, default=5, help="after one that doesn't count")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    print(f"# {options.model}, {options.threads} threads; {machine()}")
    blocks = max(CONTEXTS) // BLOCK_SIZE + max(BATCHES) * 16
    ours = Ours(modelstore.resolve(options.model), "bfloat16", options.threads, blocks, 512)
    by_context(ours, options.rounds)
    by_batch(ours.runner.card, ours.runner.layout, options.rounds)


if __name__ == "__main__":
    main()
