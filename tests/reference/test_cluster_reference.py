"""What a disaggregated cluster answers equals transformers, from the text of a request on.

Texts and chats go in at the router, as clients send them; prompts are computed in chunks on a prefill worker, some of
their blocks come from its prefix cache, and all others travel to the decode worker, which decodes them together.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pdserve.messages import Role
from pdserve.request import Chat, ChatMessage, Input
from pdserve.sampling import SamplingParams
from pdserve.service.config import Config, EngineConfig
from pdserve.tokenizer import Tokenizer
from tests.reference.llama_reference import LOGITS_WITHIN, MARGIN, NUM_POSITIONS, reference_logits
from tests.reference.prompts import CHATS, LONG, TEXTS
from tests.support.torch_cluster import Answer, Job, Record, Shape, Shelf, TorchCluster, play

pytestmark = pytest.mark.timeout(600)  # half a minute where nothing else runs

CHUNK = 128
WORKERS = (("p0", Role.PREFILL), ("d0", Role.DECODE))
NAMED: dict[str, Input] = {
    **{name: TEXTS[name] for name in ("capital", "python", "chinese", "emoji", "whitespace")},
    **{
        name: Chat(tuple(ChatMessage(turn["role"], turn["content"]) for turn in CHATS[name]))
        for name in ("system", "turns")
    },
    "long": LONG,
    "long again": LONG[: len(LONG) * 3 // 4] + "And so they came back.",
}


@pytest.fixture(scope="module")
def logits() -> dict[tuple[int, ...], Tensor]:
    """Of all samples, by the ids before them."""
    return {}


@pytest.fixture(scope="module")
def record(smollm2: Path, logits: dict[tuple[int, ...], Tensor]) -> Record:
    """Greedy float32 answers: all of NAMED but the last at once, then that one."""
    shelf = Shelf(smollm2, Tokenizer.load(smollm2), dtype="float32", deterministic=False, keep_in=logits)
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=NUM_POSITIONS)
    *first, last = (Job(prompt=prompt, sampling=params, seed=1) for prompt in NAMED.values())

    async def talk(cluster: TorchCluster) -> list[Answer]:
        answers = await cluster.ask_all(first, len(first))
        return [*answers, await cluster.ask(last)]

    engine = EngineConfig(dtype="float32", max_step_tokens=CHUNK, max_batch=16)
    return play(shelf, Shape(config=Config(engine=engine), workers=WORKERS, num_blocks=512), talk)


def test_it_was_served_apart(record: Record) -> None:
    assert all((answer.prefill_worker, answer.decode_worker) == ("p0", "d0") for answer in record.answers)
    assert record.longest_row["p0"] == CHUNK
    assert record.longest_row["d0"] == 1
    assert record.largest_batch["d0"] >= 4
    long, again = record.answers[-2:]
    assert len(long.prompt_ids) > 2_000
    assert again.num_cached > 1_000


def test_prompt_ids_equal(record: Record, reference_tokenizer: Any) -> None:
    for (name, prompt), answer in zip(NAMED.items(), record.answers, strict=True):
        if isinstance(prompt, str):
            want = reference_tokenizer(prompt).input_ids
        else:
            rendered = reference_tokenizer.apply_chat_template(
                CHATS[name], add_generation_prompt=True, tokenize=True, return_dict=True
            )
            want = rendered["input_ids"]
        assert list(answer.prompt_ids) == want, name


def test_logits_and_tokens_equal(
    record: Record, logits: dict[tuple[int, ...], Tensor], reference: Any
) -> None:
    """Our tokens are the reference's unless its two best are close; so is the text up to the first such place."""
    compared = 0
    for name, answer in zip(NAMED, record.answers, strict=True):
        want = reference_logits(reference, answer.ids)
        first = len(answer.prompt_ids)
        ours = torch.stack([logits[answer.ids[: first + index]] for index in range(NUM_POSITIONS)])
        assert float((ours - want).abs().max()) < LOGITS_WITHIN, name
        best = want.topk(2).values
        clear = best[:, 0] - best[:, 1] > MARGIN
        same = want.argmax(dim=-1) == torch.tensor(answer.token_ids)
        assert same[clear].all(), name
        compared += int(clear.sum())
    assert compared >= 0.95 * NUM_POSITIONS * len(NAMED)


def test_text_equals(record: Record, reference_tokenizer: Any) -> None:
    for answer in record.answers:
        assert answer.text == reference_tokenizer.decode(answer.token_ids, skip_special_tokens=True)
