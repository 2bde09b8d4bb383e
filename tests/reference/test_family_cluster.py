"""Every family in a disaggregated cluster against transformers: chunks, cache hits, batches of one token."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pdserve.sampling import SamplingParams
from pdserve.service.config import Config, EngineConfig
from pdserve.tokenizer import Tokenizer
from tests.reference.test_families import LOGITS_WITHIN, reference_logits
from tests.support.random_families import VOCAB_SIZE, save_random
from tests.support.serving import ONE_PAIR
from tests.support.torch_cluster import Answer, Job, Shape, Shelf, TorchCluster, play

CHUNK, NUM_TOKENS = 64, 12
LENGTHS = (150, 65, 40, 7)


NAMES = (
    "llama yarn",
    "mistral",
    "mixtral",
    "qwen2 upper windows",
    "qwen3",
    "qwen3 moe",
    "gemma3 capped",
    "phi4 mini",
)


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal(name: str, tmp_path: Path) -> None:
    folder = save_random(name, tmp_path)
    logits: dict[tuple[int, ...], Tensor] = {}
    shelf = Shelf(folder, Tokenizer.fake(VOCAB_SIZE), dtype="float32", deterministic=False, keep_in=logits)
    draw = random.Random(4)
    prompts = [tuple(draw.randrange(3, VOCAB_SIZE) for _ in range(length)) for length in LENGTHS]
    again = (*prompts[0][:100], *prompts[1])
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=NUM_TOKENS)

    async def talk(cluster: TorchCluster) -> list[Answer]:
        first, *rest = (Job(prompt=prompt, sampling=params, seed=1) for prompt in (*prompts, again))
        return [await cluster.ask(first), *await cluster.ask_all(rest, len(rest))]

    engine = EngineConfig(dtype="float32", max_step_tokens=CHUNK, max_batch=8)
    record = play(shelf, Shape(config=Config(engine=engine), workers=ONE_PAIR, num_blocks=128), talk)
    assert (record.longest_row["p0"], record.longest_row["d0"]) == (CHUNK, 1)
    assert record.largest_batch["d0"] >= 3
    assert record.answers[-1].num_cached == 96
    for answer in record.answers:
        want = reference_logits(folder, list(answer.ids[:-1]))[-NUM_TOKENS:]
        first = len(answer.prompt_ids)
        ours = torch.stack([logits[answer.ids[: first + index]] for index in range(NUM_TOKENS)])
        assert float((ours - want).abs().max()) < LOGITS_WITHIN
