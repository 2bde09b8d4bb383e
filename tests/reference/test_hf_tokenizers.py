"""Tokenizers of Hugging Face folders equal transformers' of the same folder: as its classes save them, and edited."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdserve.tokenizer import Tokenizer
from tests.reference.texts import PICKED, drawn
from tests.support.vocabularies import Vocabulary, byte_level, gemma, llama

TEXTS = [*PICKED.values(), *drawn(500, seed=1)]


def vocab_of(vocabulary: Vocabulary) -> dict[str, int]:
    return {token: token_id for token_id, token in enumerate(vocabulary.tokens)}


def merges_of(vocabulary: Vocabulary) -> Any:  # transformers' types allow less than its code
    from transformers.tokenization_utils_base import generate_merges

    if vocabulary.merges is not None:
        return [(left, right) for left, right in (merge.split(" ") for merge in vocabulary.merges)]
    ranks = {token: -float(index) for index, token in enumerate(vocabulary.tokens)}
    return generate_merges(vocab_of(vocabulary), ranks)


def gpt2() -> Any:
    from transformers import GPT2Tokenizer

    vocabulary = byte_level()
    return GPT2Tokenizer(
        vocab=vocab_of(vocabulary),
        merges=merges_of(vocabulary),
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
    )


def qwen2() -> Any:
    from transformers import Qwen2Tokenizer

    vocabulary = byte_level("qwen2")
    made = Qwen2Tokenizer(vocab=vocab_of(vocabulary), merges=merges_of(vocabulary), eos_token="<|im_end|>")
    made.add_tokens(["<tool>", "</tool>"])  # behind the vocabulary
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|vision|>"]})
    return made


def llama_like(**options: Any) -> Any:
    from transformers import LlamaTokenizer

    vocabulary = llama()
    return LlamaTokenizer(vocab=vocab_of(vocabulary), merges=merges_of(vocabulary), **options)


def gemma_like() -> Any:
    from transformers import GemmaTokenizer

    vocabulary = gemma()
    return GemmaTokenizer(vocab=vocab_of(vocabulary), merges=merges_of(vocabulary), add_bos_token=True)


def t5() -> Any:
    from transformers import T5Tokenizer

    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    pieces += [(token, -float(rank)) for rank, token in enumerate(llama().tokens[261:])]
    return T5Tokenizer(vocab=pieces, extra_ids=0)


KINDS: dict[str, Callable[[], Any]] = {
    "gpt2": gpt2,
    "qwen2 with added tokens": qwen2,
    "llama": lambda: llama_like(add_bos_token=True),
    "llama, old kind": lambda: llama_like(legacy=True, add_bos_token=True),
    "llama with end": lambda: llama_like(add_bos_token=True, add_eos_token=True),
    "llama without space": lambda: llama_like(add_prefix_space=False),
    "gemma": gemma_like,
    "unigram": t5,
}


@pytest.fixture(scope="module", params=KINDS)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    made = KINDS[request.param]()
    folder = tmp_path_factory.mktemp("saved")
    made.save_pretrained(folder)
    return Tokenizer.load(folder), made


def test_ids_and_text_are_equal(both: tuple[Tokenizer, Any]) -> None:
    ours, theirs = both
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs(text).input_ids, text
        assert ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False).input_ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids), text
    assert ours.eos_token_ids == (theirs.eos_token_id,)


def test_streamed_text_equals_the_whole(both: tuple[Tokenizer, Any]) -> None:
    ours, _ = both
    for text in TEXTS:
        ids = ours.encode(text)
        stream = ours.stream()
        assert "".join([stream.step([token_id]) for token_id in ids]) + stream.flush() == ours.decode(ids)


@pytest.mark.parametrize(
    "edit",
    [
        {"add_bos_token": True, "bos_token": "<|im_start|>"},
        {"add_eos_token": True},
        {"additional_special_tokens": ["<|im_start|>", "<think>"]},
        {"extra_special_tokens": ["<|im_start|>", "<new>"]},
        {"pad_token": "<pad>"},
        {
            "bos_token": {
                "__type": "AddedToken",
                "content": "<|im_start|>",
                "lstrip": True,
                "rstrip": True,
                "normalized": False,
            }
        },
        {"eos_token": "the"},
    ],
)
def test_what_tokenizer_config_adds(edit: dict[str, Any], tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    gpt2().save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", **edit}
    path.write_text(json.dumps(config))
    ours, theirs = Tokenizer.load(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for text in [*TEXTS, "a <|im_start|> b<think><new><pad>the theory", "the <|im_end|>"]:
        ids = ours.encode(text)
        assert ids == theirs(text).input_ids, text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text
    assert ours.special_tokens["eos_token"] == theirs.eos_token
