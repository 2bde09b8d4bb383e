"""Every family against transformers on the same random folder: logits given the same ids, over chunks and decode."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.random_families import FAMILIES, VOCAB_SIZE, save_random
from tests.unit.engine_torch.driving import Stream, advance_with_logits, make_runner

LOGITS_WITHIN = 1e-3
NUM_TOKENS = 8
LENGTH = 150


def reference_logits(folder: Path, ids: list[int], **settings: Any) -> Tensor:
    """transformers' logits of all positions, in one pass."""
    from transformers import AutoModelForCausalLM

    models: Any = AutoModelForCausalLM
    model = models.from_pretrained(str(folder), dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([ids]), **settings).logits[0]
    return logits


@pytest.mark.parametrize("deterministic", [False, True], ids=["batched", "tiled"])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal(name: str, deterministic: bool, tmp_path: Path) -> None:
    """A prompt in chunks of 40 that outgrows the window, then tokens one by one beside a shorter sequence."""
    folder = save_random(name, tmp_path)
    source = random.Random(2)
    long, short = (
        Stream([source.randrange(3, VOCAB_SIZE) for _ in range(length)], list(range(first, first + 12)))
        for length, first in ((LENGTH, 0), (7, 12))
    )
    runner = make_runner(folder, deterministic=deterministic)
    given: dict[int, list[Tensor]] = {0: [], 1: []}
    while len(given[0]) < NUM_TOKENS:
        logits = advance_with_logits(runner, [(long, 40), (short, 40)])
        for index, row in enumerate(logits):
            if row is not None:
                given[index].append(row)
    for index, stream in enumerate((long, short)):
        ours = torch.stack(given[index])
        theirs = reference_logits(folder, stream.ids[:-1])[-len(ours) :]
        assert float((ours - theirs).abs().max()) < LOGITS_WITHIN
        assert float(theirs.std()) > 0.1
