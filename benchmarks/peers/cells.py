"""What every engine is asked for, and the loop that asks those of them that are in Python with us."""

from __future__ import annotations

import json
import sys
from typing import Any

from benchmarks.engine_sides import Side, random_prompt
from pdserve.clock import SystemClock

CLOCK = SystemClock()
DECODED = 48
CELLS: tuple[dict[str, Any], ...] = (
    *({"cell": "prefill", "tokens": tokens} for tokens in (128, 512, 2048, 8000)),
    *({"cell": "decode", "context": context, "tokens": DECODED} for context in (128, 1024)),
    *({"cell": "aggregate", "batch": batch, "context": 128, "tokens": DECODED} for batch in (8, 32)),
)
LONGEST, LARGEST_BATCH = 8_192, 32


def name_of(cell: dict[str, Any]) -> str:
    return f"{cell['cell']}-{cell.get('batch', cell.get('context', cell['tokens']))}"


def num_tokens(cell: dict[str, Any]) -> int:
    """What its seconds are for."""
    return int(cell["tokens"]) * int(cell.get("batch", 1))


def answer_cells(side: Side, vocab_size: int, about: str) -> None:
    """Do what each line of standard input asks for, and say how many seconds it took."""
    print(json.dumps({"about": about}), flush=True)
    for line in sys.stdin:
        print(json.dumps({"seconds": _seconds(side, vocab_size, json.loads(line))}), flush=True)


def _seconds(side: Side, vocab_size: int, cell: dict[str, Any]) -> float:
    if cell["cell"] == "prefill":
        ids = random_prompt(cell["tokens"], vocab_size, cell["seed"])
        begin_s = CLOCK.now_s()
        side.prefill(ids)
    else:
        side.begin(cell.get("batch", 1), cell["context"])
        side.decode()
        begin_s = CLOCK.now_s()
        for _ in range(cell["tokens"]):
            side.decode()
    return CLOCK.now_s() - begin_s
