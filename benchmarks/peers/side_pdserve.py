"""Our engine's side: the runner with its own choice of kernels. Arguments: model, threads."""

from __future__ import annotations

import sys

from benchmarks.engine_sides import BLOCK_SIZE, Ours
from benchmarks.peers.cells import DECODED, LARGEST_BATCH, LONGEST, answer_cells
from pdserve import modelstore

CHUNK_TOKENS = 512
NUM_BLOCKS = max(LONGEST // BLOCK_SIZE, LARGEST_BATCH * ((128 + DECODED) // BLOCK_SIZE + 8))


def main() -> None:
    model, threads = sys.argv[1:]
    ours = Ours(modelstore.resolve(model), "bfloat16", int(threads), NUM_BLOCKS, CHUNK_TOKENS)
    answer_cells(ours, ours.runner.card.vocab_size, ours.runner.card.numerics)


if __name__ == "__main__":
    main()
