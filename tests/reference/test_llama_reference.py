"""Logits and tokens of the packaged model equal those of transformers on the same weights.

Our engine decodes all prompts greedily in one batch, through the paged pool, long ones in chunks; the reference then
computes the same ids in one pass each, so every position is compared given the same ids. Wherever our token is the
reference's (its two best further apart than MARGIN), its own greedy text goes on like ours: free-running text is
equal up to the first near-tie.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pdserve.engine.native import library
from pdserve.engine.numerics import LinearKind, Precision, choose_precision, has_native_bfloat16
from pdserve.engine.torch_runner import TorchRunner
from pdserve.tokenizer import Tokenizer
from tests.reference.llama_reference import LOGITS_WITHIN, MARGIN, NUM_POSITIONS, reference_logits
from tests.reference.prompts import CHATS, LONG, TEXTS
from tests.unit.engine_torch.driving import Stream

pytestmark = pytest.mark.timeout(600)  # a minute where nothing else runs

FROZEN = Path(__file__).with_name("tokens.json")
CHUNK = 512
BLOCK_SIZE = 16
# transformers' bfloat16 is slow on CPUs without bfloat16 instructions.
BFLOAT16_PROMPTS = ("capital", "python", "chinese", "emoji", "question", "turns")
# Of transformers' config: what logits depend on.
COMPUTED_FROM = (
    "attention_bias", "head_dim", "hidden_act", "hidden_size", "intermediate_size", "max_position_embeddings",
    "mlp_bias", "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "rope_parameters",
    "tie_word_embeddings", "vocab_size",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A prompt, its ids with our float32 engine's tokens, and their logits, [NUM_POSITIONS, vocabulary]."""

    prompt: list[int]
    ids: list[int]
    logits: Tensor


@pytest.fixture(scope="module")
def prompts(smollm2: Path) -> dict[str, list[int]]:
    tokenizer = Tokenizer.load(smollm2)
    found = {name: tokenizer.encode(text) for name, text in TEXTS.items()}
    found |= {name: tokenizer.encode_chat(chat) for name, chat in CHATS.items()}
    found["long"] = tokenizer.encode(LONG)
    assert len(found) >= 20
    assert len(found["long"]) > 2_000
    return found


@pytest.fixture(scope="module")
def cases(smollm2: Path, prompts: dict[str, list[int]]) -> dict[str, Case]:
    runner = make_runner(smollm2, choose_precision("float32"))
    ids, logits = decode(runner, list(prompts.values()))
    return {
        name: Case(prompt, ids[index], logits[index]) for index, (name, prompt) in enumerate(prompts.items())
    }


def make_runner(folder: Path, precision: Precision) -> TorchRunner:
    return TorchRunner(
        folder,
        dtype=precision.name,
        deterministic=False,
        num_threads=1,  # steady on a machine that does other things too
        num_blocks=512,
        kv_memory_bytes=0,
        block_size=BLOCK_SIZE,
        precision=precision,
    )


def decode(
    runner: TorchRunner, prompts: Sequence[list[int]], forced: Sequence[list[int]] | None = None
) -> tuple[list[list[int]], list[Tensor]]:
    """Prefill each prompt in chunks, then decode all together, greedily or along forced ids.

    forced   ids with NUM_POSITIONS tokens behind each prompt
    returns  such ids, and the logits that those tokens came from, each [NUM_POSITIONS, vocabulary]
    """
    streams: list[Stream] = []
    first = 0
    for prompt in prompts:
        num_blocks = runner.layout.blocks_for(len(prompt) + NUM_POSITIONS)
        streams.append(Stream(list(prompt), list(range(first, first + num_blocks))))
        first += num_blocks
    collected: list[list[Tensor]] = [[] for _ in prompts]

    def step(indices: Sequence[int]) -> None:
        rows = [streams[index].row(CHUNK) for index in indices]
        logits = iter(runner.logits(rows))
        for index, row in zip(indices, rows, strict=True):
            stream, token_id = streams[index], None
            if row.sample is not None:
                here = next(logits).clone()
                collected[index].append(here)
                token_id = int(here.argmax()) if forced is None else forced[index][len(stream.ids)]
            stream.computed(row, token_id)

    for index, stream in enumerate(streams):
        while not collected[index]:
            step([index])
        assert stream.num_computed == len(prompts[index])
    for _ in range(NUM_POSITIONS - 1):
        step(range(len(streams)))
    return [stream.ids for stream in streams], [torch.stack(logits) for logits in collected]


def test_float32_logits_and_greedy_tokens(cases: dict[str, Case], reference: Any) -> None:
    compared = 0
    worst: dict[str, float] = {}
    for name, case in cases.items():
        want = reference_logits(reference, case.ids)
        worst[name] = float((case.logits - want).abs().max())
        best = want.topk(2).values
        clear = best[:, 0] - best[:, 1] > MARGIN
        same = case.logits.argmax(dim=-1) == want.argmax(dim=-1)
        assert same[clear].all(), name
        compared += int(clear.sum())
    print(f"largest logit difference {max(worst.values()):.1e}, {compared} tokens compared")
    assert max(worst.values()) < LOGITS_WITHIN, worst
    assert compared >= 0.95 * NUM_POSITIONS * len(cases)


def test_tokens_are_those_of_earlier_versions(cases: dict[str, Case]) -> None:
    """Up to the first near-tie, which another machine's rounding may decide otherwise.

    tokens.json is written by hand only: `json.dumps` of each case's ids behind its prompt, when prompts are added.
    """
    frozen: dict[str, list[int]] = json.loads(FROZEN.read_text())
    assert frozen.keys() == cases.keys()
    num_compared = 0
    for name, case in cases.items():
        best = case.logits.topk(2).values
        ties = torch.nonzero(best[:, 0] - best[:, 1] <= MARGIN).flatten().tolist()
        until = ties[0] if ties else NUM_POSITIONS
        assert case.ids[len(case.prompt) :][:until] == frozen[name][:until], name
        num_compared += until
    assert num_compared >= 0.9 * NUM_POSITIONS * len(cases)


@pytest.mark.parametrize("name", ["capital", "turns", "emoji"])
def test_free_running_text_is_equal_up_to_the_first_near_tie(
    name: str, cases: dict[str, Case], reference: Any
) -> None:
    case = cases[name]
    with torch.inference_mode():
        given = reference.generate(
            torch.tensor([case.prompt]),
            max_new_tokens=NUM_POSITIONS,
            min_new_tokens=NUM_POSITIONS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
    logits = torch.cat(given.logits)
    best = logits.topk(2).values
    ties = torch.nonzero(best[:, 0] - best[:, 1] <= MARGIN).flatten().tolist()
    until = len(case.prompt) + (ties[0] if ties else NUM_POSITIONS)
    assert case.ids[:until] == given.sequences[0].tolist()[:until]
    assert until > len(case.prompt) + 3


def precisions() -> list[Precision]:
    """What this CPU chooses for bfloat16, with compiled kernels and without; what one with its instructions does."""
    chosen = [choose_precision("bfloat16", kernels="torch")]
    if not library.why_none():
        chosen.append(choose_precision("bfloat16", kernels="native"))
    if not has_native_bfloat16():
        chosen.append(Precision("bfloat16", torch.bfloat16, torch.bfloat16, LinearKind.PLAIN))
    return chosen


@pytest.fixture(scope="module")
def plain(smollm2: Path, reference: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with weights in bfloat16: products by bytes, of weights as the GGUF file has them, err more."""
    folder = tmp_path_factory.mktemp("plain")
    model = type(reference)(reference.config).to(torch.bfloat16)
    model.load_state_dict(reference.state_dict())
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (smollm2 / name).exists():
            os.symlink(smollm2 / name, folder / name)
    return folder


@pytest.mark.parametrize(
    "names",
    [BFLOAT16_PROMPTS, pytest.param((), marks=[pytest.mark.slow, pytest.mark.timeout(1800)])],
    ids=["some", "all"],
)
def test_bfloat16_errs_no_more_than_the_reference(
    names: tuple[str, ...], plain: Path, cases: dict[str, Case], reference: Any
) -> None:
    """Root mean square against float32 over all logits of all positions: at most 1.5 times transformers' bfloat16."""
    chosen = [cases[name] for name in names or cases]
    exact = torch.cat([case.logits for case in chosen])
    theirs_model = type(reference)(reference.config).to(torch.bfloat16)
    theirs_model.load_state_dict(reference.state_dict())
    theirs_model.eval()
    theirs = rms(torch.cat([reference_logits(theirs_model, case.ids) for case in chosen]) - exact)
    for precision in precisions():
        _, logits = decode(
            make_runner(plain, precision), [case.prompt for case in chosen], [case.ids for case in chosen]
        )
        ours = rms(torch.cat(logits) - exact)
        print(f"{precision}: error {ours:.4f}, transformers {theirs:.4f}, ratio {ours / theirs:.2f}")
        assert ours <= 1.5 * theirs


def rms(values: Tensor) -> float:
    return float(values.double().pow(2).mean().sqrt())


@pytest.mark.slow
def test_the_reference_is_what_transformers_reads(smollm2: Path, reference: Any, tmp_path: Path) -> None:
    """Its weights and config are those of transformers' own import of the GGUF file."""
    from transformers import AutoConfig
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    os.symlink(smollm2 / "weights.gguf", tmp_path / "model.gguf")  # apart from our config.json
    own = AutoConfig.from_pretrained(str(tmp_path), gguf_file="model.gguf")
    for key in COMPUTED_FROM:
        assert getattr(own, key) == getattr(reference.config, key), key
    # The file holds it in float32.
    assert own.rms_norm_eps == pytest.approx(reference.config.rms_norm_eps, rel=1e-6)
    empty = type(reference)(own).to("meta")
    load: Any = load_gguf_checkpoint
    given = load(str(tmp_path / "model.gguf"), return_tensors=True, model_to_load=empty)
    state = reference.state_dict()
    assert given["tensors"].keys() == state.keys() - {"lm_head.weight"}
    for name, tensor in given["tensors"].items():
        assert torch.equal(tensor, state[name]), name
