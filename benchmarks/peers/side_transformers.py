"""transformers' side, in the dtype that is fastest on this CPU. Runs in our environment. Arguments: model, threads."""

from __future__ import annotations

import sys

import torch
import transformers

from benchmarks.engine_sides import Theirs, random_prompt
from benchmarks.peers.cells import CLOCK, answer_cells
from pdserve import modelstore
from pdserve.modelstore.model_facts import read_facts

DTYPES = ("bfloat16", "float32")


def main() -> None:
    model, threads = sys.argv[1:]
    folder = modelstore.resolve(model)
    vocab_size = read_facts(folder).vocab_size
    took_s: dict[str, float] = {}
    for dtype in DTYPES:
        side = Theirs(folder, dtype, int(threads))
        took_s[dtype] = min(_try_out(side, vocab_size) for _ in range(3))
        del side
    fastest = min(took_s, key=took_s.__getitem__)
    tried = ", ".join(f"{dtype} {seconds:.2f} s" for dtype, seconds in took_s.items())
    about = f"transformers {transformers.__version__}, torch {torch.__version__}, {fastest} ({tried})"
    answer_cells(Theirs(folder, fastest, int(threads)), vocab_size, about)


def _try_out(side: Theirs, vocab_size: int) -> float:
    """Seconds of a little of everything."""
    begin_s = CLOCK.now_s()
    side.prefill(random_prompt(256, vocab_size, 1))
    side.begin(1, 256)
    for _ in range(4):
        side.decode()
    return CLOCK.now_s() - begin_s


if __name__ == "__main__":
    main()
