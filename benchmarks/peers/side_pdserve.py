"""Our engine's side: the runner with its own choice of kernels. Arguments: model, threads."""

from __future__ import annotations

import json
import sys

from benchmarks.engine_sides import BLOCK_SIZE, Ours, random_prompt
from pdserve import modelstore
from pdserve.clock import SystemClock

CHUNK_TOKENS = 512
NUM_BLOCKS = 2_048 // BLOCK_SIZE + 64
CLOCK = SystemClock()


def main() -> None:
    model, threads = sys.argv[1:]
    ours = Ours(modelstore.resolve(model), "bfloat16", int(threads), NUM_BLOCKS, CHUNK_TOKENS)
    print(json.dumps({"about": ours.runner.card.numerics}), flush=True)
    for line in sys.stdin:
        cell = json.loads(line)
        if cell["cell"] == "prefill":
            ids = random_prompt(cell["tokens"], ours.runner.card.vocab_size, cell["seed"])
            begin_s = CLOCK.now_s()
            ours.prefill(ids)
        else:
            ours.begin(1, cell["context"])
            ours.decode()
            begin_s = CLOCK.now_s()
            for _ in range(cell["tokens"]):
                ours.decode()
        print(json.dumps({"seconds": CLOCK.now_s() - begin_s}), flush=True)


if __name__ == "__main__":
    main()
