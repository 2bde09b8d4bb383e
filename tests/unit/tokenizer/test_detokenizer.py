"""Streamed text, put together, equals the text of all ids at once, at every split."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.detokenizer import byte_spelling
from pdserve.tokenizer import Tokenizer

FAKE = Tokenizer.fake(300)
ANY_IDS = st.lists(st.integers(0, 310), max_size=40)  # bytes, eos, words, ids outside the vocabulary


@given(ids=ANY_IDS, data=st.data())
@settings(max_examples=300, deadline=None)
def test_any_ids_at_any_splits(ids: list[int], data: st.DataObject) -> None:
    stream = FAKE.stream()
    text = ""
    rest = ids
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        text += stream.step(rest[:size])
        rest = rest[size:]
    assert text + stream.flush() == FAKE.decode(ids)


@given(text=st.text(max_size=40))
@settings(max_examples=200, deadline=None)
def test_text_comes_back_and_no_character_waits_longer_than_it_must(text: str) -> None:
    text = text.replace("<", "")  # so that no token of several characters appears
    stream = FAKE.stream()
    for character in text:
        pieces = [stream.step([byte]) for byte in character.encode()]
        assert pieces == [""] * (len(pieces) - 1) + [character]
    assert stream.flush() == ""


def test_streams_of_one_tokenizer_do_not_disturb_each_other() -> None:
    one, other = FAKE.stream(), FAKE.stream()
    first, second, third = "世".encode()
    assert one.step([first]) == ""
    assert other.step([65]) == "A"
    assert one.step([second, third]) == "世"


def test_an_unfinished_character_comes_with_the_flush() -> None:
    stream = FAKE.stream()
    assert stream.step([0xE4, 0xB8]) == ""
    assert stream.flush() == "\ufffd" == FAKE.decode([0xE4, 0xB8])


def test_the_byte_alphabet_is_gpt2s() -> None:
    spelling = byte_spelling()
    assert len(set(spelling)) == 256
    assert (spelling[0x20], spelling[0x0A], spelling[0x41], spelling[0xAD], spelling[0x7F]) == (
        "Ġ",
        "Ċ",
        "A",
        "Ń",
        "ġ",
    )
