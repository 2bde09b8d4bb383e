"""lm-eval's `local-completions`, as it comes, against `pdserve up`; transformers computes the same on the same weights.

Its tasks are in lm_eval/: answers to questions, whole texts, and what the model writes. Float32 on both sides.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.reference.llama_reference import load_reference
from tests.support.foreign_clients import SMALL
from tests.support.processes import LocalCluster

TASKS = Path(__file__).with_name("lm_eval")
WITHIN = 1e-3
MAX_TOKENS = 12

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), SMALL.needed]


class Reference:
    """transformers' model and tokenizer."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self.model = load_reference(folder)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(str(folder))

    def score(self, context: str, text: str) -> tuple[float, bool]:
        """Sum of the log-probabilities of a text's tokens behind the context, and whether each was the likeliest."""
        before = self.ids(context) if context else [self.tokenizer.bos_token_id]
        ids = self.ids(context + text) if context else [*before, *self.ids(text)]
        assert ids[: len(before)] == before
        with torch.inference_mode():
            logprobs = self.model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        rows, wanted = logprobs[len(before) - 1 : -1], torch.tensor(ids[len(before) :])
        return float(rows.gather(1, wanted[:, None]).sum()), bool((rows.argmax(-1) == wanted).all())

    def write_on(self, context: str) -> str:
        """Its greedy tokens up to the end of the line."""
        ids = torch.tensor([self.ids(context)])
        with torch.inference_mode():
            whole = self.model.generate(ids, max_new_tokens=MAX_TOKENS, do_sample=False)[0]
        text: str = self.tokenizer.decode(whole[ids.shape[1] :], skip_special_tokens=True)
        return text.split("\n")[0]

    def ids(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return found


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> Reference:
    return Reference(smollm2)


@pytest.mark.parametrize(("as_ids", "batch_size"), [(True, 2), (False, 1)], ids=["ids", "texts"])
def test_lm_eval(
    smollm2_cluster: LocalCluster,
    smollm2: Path,
    reference: Reference,
    tmp_path: Path,
    as_ids: bool,
    batch_size: int,
) -> None:
    """Prompts as lists of ids, two in one request; and as texts."""
    url = f"{smollm2_cluster.http}/v1/completions"
    arguments = f"model=smollm2-135m,base_url={url},tokenizer={smollm2},num_concurrent=2"
    SMALL.run(
        "lm_eval", "run", "--include_path", ".", "--batch_size", str(batch_size),
        "--model", "local-completions", "--model_args", f"{arguments},tokenized_requests={as_ids}",
        "--tasks", "facts,texts,writing", "--output_path", str(tmp_path / "out"), "--log_samples",
        folder=TASKS, env={"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")},
    )  # fmt: skip
    apart = [0.0]
    for sample in samples(tmp_path / "out", "facts"):
        for asked, ((found, is_greedy),) in zip(sample["arguments"].values(), sample["resps"], strict=True):
            want, want_greedy = reference.score(asked["arg_0"], asked["arg_1"])
            apart.append(abs(float(found) - want))
            assert (is_greedy == "True") == want_greedy
    for sample in samples(tmp_path / "out", "texts"):
        want, _ = reference.score("", sample["doc"]["text"])
        apart.append(abs(float(sample["resps"][0][0]) - want))
    print(f"{len(apart) - 1} log-likelihoods at most {max(apart):.1e} from transformers'")
    assert len(apart) == 12 and max(apart) < WITHIN
    for sample in samples(tmp_path / "out", "writing"):
        assert sample["resps"][0][0] == reference.write_on(sample["doc"]["question"])


def samples(folder: Path, task: str) -> list[dict[str, Any]]:
    """What it asked and was answered, of one task."""
    (file,) = folder.glob(f"*/samples_{task}_*.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]
