"""How tokenizers of GGUF files cut text, as llama.cpp does; `make test-vocabularies` compares with its own ids."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend

from pdserve.modelstore.gguf_byte_level import WORDS
from pdserve.modelstore.gguf_file import GgufFile
from pdserve.modelstore.gguf_tokenizer import tokenizer_config, tokenizer_json
from pdserve.tokenizer import Tokenizer
from tests.support.vocabularies import NORMAL, USER_DEFINED, Vocabulary, byte_level, llama

TEXT = "It's 2024:\n    x1 = 1234567;  y  `HELLO worldNew` ½ IT'S!!\n\n/z"
CUT = {  # ¶ for a line break
    "default": "It|'|s| |202|4|:|¶   | x|1| |=| |123|456|7|;| | y| | `|HELLO| worldNew|`| |½| IT|'|S|!!|¶¶|/|z",
    "falcon": "It|'|s| |202|4|:|¶   | x|1| |=| |123|456|7|;| | y|  |`|HELLO| worldNew|`| ½| IT|'|S|!!|¶¶|/|z",
    "gpt-2": "It|'s| 2024|:|¶   | x|1| =| 1234567|;| | y| | `|HELLO| worldNew|`| ½| IT|'|S|!!|¶|¶|/|z",
    "smollm": "It|'s| |2|0|2|4|:|¶   | x|1| =| |1|2|3|4|5|6|7|;| | y| | `|HELLO| worldNew|`| |½| IT|'|S|!!|¶|¶|/|z",
    "llama-bpe": "It|'s| |202|4|:¶|   | x|1| =| |123|456|7|;| | y| | `|HELLO| worldNew|`| |½| IT|'S|!!¶¶|/z",
    "qwen2": "It|'s| |2|0|2|4|:¶|   | x|1| =| |1|2|3|4|5|6|7|;| | y| | `|HELLO| worldNew|`| |½| IT|'S|!!¶¶|/z",
    "tekken": "It|'s| |2|0|2|4|:¶|   | x|1| =| |1|2|3|4|5|6|7|;| | y| | `|HELLO| world|New|`| |½| IT|'S|!!¶¶/|z",
    "gpt-4o": "It's| |202|4|:¶|   | x|1| =| |123|456|7|;| | y| | `|HELLO| world|New|`| |½| IT'S|!!¶¶/|z",
}
ALIKE = {
    "gpt-2": ("mpt",),
    "smollm": ("starcoder", "refact", "command-r"),
    "llama-bpe": ("llama3", "llama-v3", "falcon3", "pixtral", "smaug-bpe", "dbrx"),
    "qwen2": ("deepseek-r1-qwen",),
}
MERGES_IGNORED = {"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken"}


def imported(vocabulary: Vocabulary) -> Tokenizer:
    metadata = {f"tokenizer.ggml.{key}": value for key, value in vocabulary.metadata().items()}
    file = GgufFile(Path("m.gguf"), {"general.architecture": "llama", **metadata}, {})
    return Tokenizer.from_files(
        {
            "tokenizer.json": tokenizer_json(file).encode(),
            "tokenizer_config.json": json.dumps(tokenizer_config(file)).encode(),
        }
    )


def words(tokenizer: Tokenizer, text: str) -> list[str]:
    backend = Backend.from_buffer(tokenizer.files["tokenizer.json"])
    pieces = backend.pre_tokenizer.pre_tokenize_str(text)
    return [text[begin:end] for _, (begin, end) in pieces]


def test_every_pre_tokenizer_is_tried() -> None:
    assert {*CUT, *(name for names in ALIKE.values() for name in names)} == set(WORDS)


@pytest.mark.parametrize("pre", CUT)
def test_words(pre: str) -> None:
    for name in (pre, *ALIKE.get(pre, ())):
        tokenizer = imported(byte_level(name))
        assert "|".join(words(tokenizer, TEXT)).replace("\n", "¶") == CUT[pre]


def test_blanks_before_a_digit_are_one_word_where_digits_are_words() -> None:
    assert words(imported(byte_level("smollm")), "if x:\n    4") == ["if", " x", ":", "\n    ", "4"]


@pytest.mark.parametrize("pre", WORDS)
def test_a_word_that_no_merges_make(pre: str) -> None:
    vocabulary = byte_level(pre).with_tokens(["Ġxqj"], NORMAL)
    tokenizer = imported(vocabulary)
    ids = tokenizer.encode("a xqj", add_special_tokens=False)
    assert (ids[-1] == len(vocabulary.tokens) - 1) == (pre in MERGES_IGNORED)
    assert tokenizer.decode(ids) == "a xqj"


def test_text_gets_a_begin_where_such_files_mean_it() -> None:
    begins = {pre for pre in WORDS if imported(byte_level(pre)).encode("") == [1]}
    assert begins == MERGES_IGNORED


def test_users_tokens_are_found_in_the_text_as_they_are_written() -> None:
    vocabulary = byte_level("mpt").with_tokens(["   ", "\n\n"], USER_DEFINED)
    first = len(vocabulary.tokens) - 2
    ids = imported(vocabulary).encode("a   b\n\n", add_special_tokens=False)
    assert ids[1] == first and ids[-1] == first + 1
    assert imported(vocabulary).decode(ids) == "a   b\n\n"


@pytest.mark.parametrize(
    ("text", "spelled"),
    [
        (" ", "▁▁"),
        ("  a", "▁▁▁a"),
        ("a", "▁a"),
        ("<|user|>a", "<|user|>▁a"),
        ("a<|user|> a", "▁a<|user|>▁▁a"),
        ("<tool>a", "<tool>▁a"),
    ],
)
def test_a_space_stands_before_each_text_between_special_tokens(text: str, spelled: str) -> None:
    tokenizer = imported(llama())
    backend = Backend.from_buffer(tokenizer.files["tokenizer.json"])
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert "".join(backend.id_to_token(token_id) or "" for token_id in ids) == spelled
    if "<" not in text:
        assert tokenizer.decode(ids) == text
