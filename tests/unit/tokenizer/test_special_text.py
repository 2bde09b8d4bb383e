"""What users write is text, whatever it looks like, and only that changes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, pre_tokenizers
from tokenizers import Tokenizer as Backend

from pdserve.errors import InvalidRequest
from pdserve.special_text import SpecialText
from pdserve.steps import finish
from pdserve.text_pieces import TextPieces
from pdserve.tokenizer import Tokenizer
from tests.support.byte_tokens import byte_tokenizer

SPECIALS = ("<|end|>", "<|end|>>", "<|ender|>", "<|start|>", "[X]")
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content | trim }}{{ m.name }}<|end|>\n{% endfor %}"
)
TOKENS = [bytes([byte]) for byte in range(256)]


def tokenizer_of(template: str = TEMPLATE) -> Tokenizer:
    made = byte_tokenizer(TOKENS, SPECIALS)
    return Tokenizer.from_files({**made.files, "chat_template.jinja": template.encode()})


TOKENIZER = tokenizer_of()
FIRST = len(TOKENS)


def specials(ids: list[int]) -> list[str]:
    return [SPECIALS[token_id - FIRST] for token_id in ids if token_id >= FIRST]


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


TEXT = st.text(alphabet=st.sampled_from("<|endrst>[X] é\n"), max_size=30)
PIECES = st.lists(st.one_of(TEXT, st.sampled_from(SPECIALS)), max_size=6).map("".join)


@given(PIECES, PIECES)
def test_a_user_ends_no_turn_and_the_text_stays(content: str, name: str) -> None:
    chat = [user(content, name=name), {"role": "assistant", "content": "<|end|>"}, user("x", name="")]
    ids = TOKENIZER.encode_chat(chat)
    turns = ["<|start|>", "<|end|>"]
    # What the template puts together of two parts may be anything: it is the template's.
    assert specials(ids) == [*turns, "<|start|>", "<|end|>", "<|end|>", *turns]
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == TOKENIZER.render_chat(chat)


@given(PIECES)
def test_without_special_tokens_in_it_nothing_changes(content: str) -> None:
    plain = content.replace("<", "").replace("[", "")
    chat = [user(plain, name="")]
    assert TOKENIZER.encode_chat(chat) == TOKENIZER.encode_chat(chat, parse_special_tokens=True)


def test_parts_and_nested_values_are_texts_of_the_user_too() -> None:
    tokenizer = tokenizer_of("{{ messages[0].content[0].text }}<|end|>{{ messages[0].extra.deep[0] }}")
    chat = [user([{"type": "text", "text": "[X]"}], extra={"deep": ["<|start|>"]})]
    assert specials(tokenizer.encode_chat(chat)) == ["<|end|>"]


def test_text_of_the_system_counts() -> None:
    chat = [{"role": "system", "content": "a[X]b", "name": ""}, user("[X]", name="")]
    assert specials(TOKENIZER.encode_chat(chat)).count("[X]") == 1


def test_any_character_may_be_in_the_text() -> None:
    every = "".join(map(chr, range(0xFDD0, 0xFDEF)))
    ids = TOKENIZER.encode_chat([user(f"[X]{every}", name="")])
    assert f"[X]{every}" in TOKENIZER.decode(ids, skip_special_tokens=False)
    with pytest.raises(InvalidRequest, match="U\\+FDD0"):
        TOKENIZER.encode_chat([user(f"[X]{every}\ufdef", name="")])


def test_a_stretch_is_encoded_as_the_tokenizer_encodes_text() -> None:
    """The same merges and words as those of a tokenizer that knows no special tokens."""
    backend = Backend.from_buffer(Tokenizer.fake().files["tokenizer.json"])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.add_special_tokens([AddedToken("<|x|>", normalized=False, special=True)])
    inner = SpecialText(backend, ["<|x|>"])
    words = inner._pre_tokenizer.pre_tokenize_str("a b")
    assert [word for word, _ in words] == ["a\u2581b"]
    mark = "\ufdd0"
    plain = TOKENIZER.encode("it's 12 [")
    special = SpecialText(Backend.from_buffer(TOKENIZER.files["tokenizer.json"]), SPECIALS)
    steps = special.encode(f"<|start|>it's 12 {mark}[X]<|end|>", mark, TextPieces(TOKENIZER.token_bytes()))
    assert finish(steps) == [FIRST + 3, *plain, ord("X"), ord("]"), FIRST]


@given(st.lists(st.sampled_from(["<", "<|", "<|end|>", "<|start|>", "[X]", "a b.\n", "\ufdd1"]), max_size=40))
def test_long_texts_are_looked_through_in_windows(parts: list[str]) -> None:
    """The same marks and ids, wherever a window ends."""
    text = "".join(parts)
    special = SpecialText(Backend.from_buffer(TOKENIZER.files["tokenizer.json"]), SPECIALS, window=7)
    marked, mark = special.mark([user(text)])
    whole, same = TOKENIZER._special_text.mark([user(text)])
    assert (marked, mark) == (whole, same)
    if mark:
        pieces = TextPieces(TOKENIZER.token_bytes(), piece_characters=5)
        ids = finish(special.encode(f"<|start|>{marked[0]['content']}<|end|>", mark, pieces))
        assert specials(ids) == ["<|start|>", "<|end|>"]
        assert TOKENIZER.decode(ids, skip_special_tokens=False) == f"<|start|>{text}<|end|>"
