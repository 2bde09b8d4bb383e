"""The engine without anything around it, for benchmarks.serving: scheduler, pool and runner in one thread.

Arguments: model, threads. Each line of standard input is a cell: streams, prompt, tokens, seed.
"""

from __future__ import annotations

import json
import sys
from itertools import count

from benchmarks.engine_sides import GREEDY, random_prompt
from pdserve import modelstore
from pdserve.clock import SystemClock
from pdserve.engine.engine import Engine
from pdserve.engine.events import Sampled
from pdserve.engine.scheduler import EngineLimits
from pdserve.engine.sequence import Sequence
from pdserve.engine.torch_runner import TorchRunner

CLOCK = SystemClock()


def main() -> None:
    model, threads = sys.argv[1:]
    runner = TorchRunner(
        modelstore.resolve(model),
        dtype="auto",
        deterministic=False,
        num_threads=int(threads),
        num_blocks=None,
        kv_memory_bytes=1 << 30,
        block_size=16,
    )
    engine = Engine(runner, EngineLimits(decode_prefill_tokens=None, prefix_cache=False), CLOCK)
    print(json.dumps({"about": runner.card.numerics}), flush=True)
    handles = count(1)
    for line in sys.stdin:
        cell = json.loads(line)
        print(json.dumps(run(engine, handles, **cell)), flush=True)


def run(
    engine: Engine, handles: count[int], *, streams: int, prompt: int, tokens: int, seed: int
) -> dict[str, object]:
    """All streams at once; seconds in all, moments of each one's tokens, and the thread's processor time."""
    vocab_size = engine.runner.card.vocab_size
    begin_s, begin_cpu_s = CLOCK.now_s(), CLOCK.cpu_s()
    came: dict[int, list[float]] = {}
    for number in range(streams):
        ids = random_prompt(prompt, vocab_size, seed * 1_000 + number)
        seq = Sequence(handle=next(handles), session_id=0, ids=ids, num_prompt_tokens=len(ids), key=GREEDY)
        came[seq.handle] = []
        assert engine.reserve_prefill(seq, then_decode=True)
        engine.start_prefill(seq, then_decode=True)
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, Sampled):
                moments = came[event.seq.handle]
                moments.append(CLOCK.now_s() - begin_s)
                if len(moments) == tokens:
                    engine.end(event.seq)
    return {
        "seconds": CLOCK.now_s() - begin_s,
        "cpu_s": CLOCK.cpu_s() - begin_cpu_s,
        "token_s": list(came.values()),
    }


if __name__ == "__main__":
    main()
