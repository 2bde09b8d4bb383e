"""Streamed text, put together, equals the text of all ids at once, at every split."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from pdserve.detokenizer import byte_spelling
from pdserve.errors import InvalidRequest
from pdserve.tokenizer import Tokenizer

FAKE = Tokenizer.fake(300)
ANY_IDS = st.lists(st.integers(0, 310), max_size=40)  # bytes, eos, words, ids outside the vocabulary


@pytest.mark.parametrize("skip_special_tokens", [True, False])
@given(ids=ANY_IDS, data=st.data())
@settings(max_examples=200, deadline=None)
def test_any_ids_at_any_splits(skip_special_tokens: bool, ids: list[int], data: st.DataObject) -> None:
    stream = FAKE.stream(skip_special_tokens=skip_special_tokens)
    text = ""
    rest = ids
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        text += stream.step(rest[:size])
        rest = rest[size:]
    assert text + stream.flush() == FAKE.decode(ids, skip_special_tokens=skip_special_tokens)


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


def pieces(*, strips: bool) -> Tokenizer:
    """Byte fallback, spaces as ▁, perhaps the first space stripped: ids 0–255 the bytes, then pieces, then specials."""
    vocab = [*(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "a", "é", "▁▁", "世界", "<0x4", "1>"]
    backend = Backend(models.BPE({piece: index for index, piece in enumerate(vocab)}, [], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips else steps)
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    backend.add_tokens([AddedToken("<tool▁x>", special=False)])
    return Tokenizer.from_files({"tokenizer.json": str(backend.to_str()).encode()})


STRIPPING, PLAIN = pieces(strips=True), pieces(strips=False)
BYTES_AND_PIECES = st.lists(
    st.integers(0, 275) | st.sampled_from([0x20, 0xE4, 0xB8, 0x96, 256, 264]), max_size=30
)


@given(ids=BYTES_AND_PIECES, data=st.data(), tokenizer=st.sampled_from([STRIPPING, PLAIN]))
@settings(max_examples=400, deadline=None)
def test_pieces_and_bytes_at_any_splits(ids: list[int], data: st.DataObject, tokenizer: Tokenizer) -> None:
    stream = tokenizer.stream()
    text, rest = "", ids
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        text += stream.step(rest[:size])
        rest = rest[size:]
    assert text + stream.flush() == tokenizer.decode(ids)


@given(text=st.text(max_size=30), tokenizer=st.sampled_from([STRIPPING, PLAIN]))
@settings(max_examples=200, deadline=None)
def test_bytes_of_a_text_give_what_the_package_gives(text: str, tokenizer: Tokenizer) -> None:
    backend = Backend.from_buffer(tokenizer.files["tokenizer.json"])
    ids = list(text.encode())
    assert tokenizer.decode(ids) == backend.decode(ids)
    broken = [0xE4, 0xB8] * len(text)  # a run without any character: one mark a byte
    assert tokenizer.decode(broken) == backend.decode(broken) == "\ufffd" * len(broken)


def test_characters_around_a_broken_byte_stay_and_come_at_once() -> None:
    ids = [*"世".encode(), 0xFF, *"界".encode()]
    stream = PLAIN.stream()
    assert [stream.step([token_id]) for token_id in ids] == ["", "", "世", "\ufffd", "", "", "界"]
    assert PLAIN.decode(ids) == "世\ufffd界"


def test_endless_broken_bytes_are_told_as_they_come() -> None:
    stream = STRIPPING.stream()
    assert [stream.step([0x80]) for _ in range(50)] == ["\ufffd"] * 50


def test_special_tokens_of_pieces_show_only_if_asked() -> None:
    ids = [264, 257, 265, 266]
    assert STRIPPING.decode(ids) == "a<tool x>"
    assert STRIPPING.decode(ids, skip_special_tokens=False) == "<s> a</s><tool x>"
    with pytest.raises(InvalidRequest, match="0 to"):
        STRIPPING.decode([-1])
