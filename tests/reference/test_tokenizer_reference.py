"""Prompt token ids of the packaged model equal those of transformers on the same file, chat template included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdserve.tokenizer import Tokenizer
from tests.reference import prompts
from tests.reference.texts import PICKED, drawn

TEXTS = {
    **PICKED,
    **{f"drawn {index}": text for index, text in enumerate(drawn(500))},
    **{f"compared {name}": text for name, text in prompts.TEXTS.items()},
    "compared long": prompts.LONG,
}

SYSTEM = {"role": "system", "content": "You answer in one word."}
USER = {"role": "user", "content": "  What is 2 + 2?\nShow `code`: 🧮  "}
ANSWER = {"role": "assistant", "content": "Four. "}
CHATS: dict[str, list[dict[str, str]]] = {
    "user": [USER],
    "system": [SYSTEM, USER],
    "several turns": [SYSTEM, USER, ANSWER, {"role": "user", "content": "Why? 为什么?"}],
    "empty content": [{"role": "user", "content": ""}],
    "markers in content": [{"role": "user", "content": "<|im_end|>\n<|im_start|>assistant"}],
    "long": [USER, ANSWER] * 150 + [USER],
    **{f"compared {name}": chat for name, chat in prompts.CHATS.items()},
}


@pytest.fixture(scope="module")
def ours(smollm2: Path) -> Tokenizer:
    return Tokenizer.load(smollm2)


def test_text_ids_equal(ours: Tokenizer, reference_tokenizer: Any) -> None:
    for name, text in TEXTS.items():
        ids = ours.encode(text)
        assert ids == reference_tokenizer(text).input_ids, name
        plain = reference_tokenizer(text, add_special_tokens=False).input_ids
        assert ours.encode(text, add_special_tokens=False) == plain, name
        assert ours.decode(ids) == reference_tokenizer.decode(ids, skip_special_tokens=True), name
        assert ours.decode(ids, skip_special_tokens=False) == reference_tokenizer.decode(ids), name


@pytest.mark.parametrize("name", CHATS)
def test_chat_ids_equal(name: str, ours: Tokenizer, reference_tokenizer: Any) -> None:
    chat = CHATS[name]
    want = reference_tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, tokenize=True, return_dict=True
    )
    assert ours.encode_chat(chat, parse_special_tokens=True) == want["input_ids"]
    assert (ours.encode_chat(chat) == want["input_ids"]) == (name != "markers in content")
    text = reference_tokenizer.apply_chat_template(chat, add_generation_prompt=False, tokenize=False)
    assert ours.render_chat(chat, add_generation_prompt=False) == text


@pytest.mark.parametrize("name", ["several turns", "system"])
def test_continued_chat_equal(name: str, ours: Tokenizer, reference_tokenizer: Any) -> None:
    chat = [*CHATS[name], {"role": "assistant", "content": "It is fo"}]
    want = reference_tokenizer.apply_chat_template(chat, continue_final_message=True, tokenize=False)
    assert ours.render_chat(chat, add_generation_prompt=False, continue_final_message=True) == want


def test_long_prompts_are_long(ours: Tokenizer) -> None:
    assert len(ours.encode(TEXTS["long"])) > 2_000
    assert len(ours.encode(TEXTS["long mixed"])) > 2_000
    assert len(ours.encode_chat(CHATS["long"])) > 2_000


def test_transformers_reads_the_folder_too(smollm2: Path, ours: Tokenizer) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(smollm2))
    for text in TEXTS.values():
        assert theirs(text).input_ids == ours.encode(text)
    chat = CHATS["several turns"]
    assert theirs.apply_chat_template(chat, tokenize=False) == ours.render_chat(
        chat, add_generation_prompt=False
    )
    assert theirs.eos_token_id in ours.eos_token_ids


def test_streamed_text_equals_the_whole(ours: Tokenizer) -> None:
    for text in TEXTS.values():
        ids = ours.encode(text)
        stream = ours.stream()
        pieces = [stream.step([token_id]) for token_id in ids]
        assert "".join(pieces) + stream.flush() == ours.decode(ids)
