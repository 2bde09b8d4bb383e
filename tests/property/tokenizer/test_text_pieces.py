"""Ids of a text's pieces, put together, are those of the whole; and those of its end are the whole's last ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from pdserve.errors import InvalidRequest
from pdserve.steps import finish
from pdserve.text_pieces import MAX_UNCUT_CHARACTERS, TextPieces
from pdserve.tokenizer import Tokenizer

CORPUS = [
    "The sea was calm, and the ships lay still at nine; low tide.\n\nIt's 12:30, don't wait (really)!\n",
    "def f(x):\n    return [x, 1.25, 'abc'] * 10_000  # comment\n\n\tfoo()\r\n\r\nbar = {1: 2}\n",
    "我们的语言模型，很好。你好！\n我们\n\n语言 こんにちは、世界。さようなら\n",
    "aaaa aaaaaaaa bb   bbb    1234567 éàü ß 😀😀 \u0301x\n",
]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def trained(
    pre_tokenizer: Any, normalizer: Any = None, specials: list[str] | None = None, training: Any = None
) -> Backend:
    """training: splits the words that are learned from, if that is done otherwise."""
    made = Backend(BPE(unk_token=None if specials is None else "<unk>", byte_fallback=specials is not None))
    made.pre_tokenizer, made.normalizer = training or pre_tokenizer, normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet() if specials is None else []
    made.train_from_iterator(
        CORPUS * 3,
        BpeTrainer(
            vocab_size=900, initial_alphabet=alphabet, special_tokens=specials or [], show_progress=False
        ),
    )
    made.pre_tokenizer = pre_tokenizer
    made.add_special_tokens([AddedToken("<|end|>", normalized=False, special=True), "[X] y", "<|tail|>"])
    return made


def byte_level(regex: str | None) -> Backend:
    split: list[Any] = [] if regex is None else [pre_tokenizers.Split(Regex(regex), "isolated")]
    made = trained(
        pre_tokenizers.Sequence(
            [*split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex is None)]
        ),
        normalizers.NFC(),
    )
    made.decoder = decoders.ByteLevel()
    around = [(name, made.token_to_id(name)) for name in ("<|end|>", "<|tail|>")]
    made.post_processor = processors.TemplateProcessing(single="<|end|> $A <|tail|>", special_tokens=around)
    return made


def pieces_kind(pre_tokenizer: Any, normalizer: Any) -> Backend:
    words = pre_tokenizers.Split("\u2581", "merged_with_next")
    made = trained(pre_tokenizer, normalizer, ["<unk>", *BYTES], pre_tokenizer or words)
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return made


KINDS: dict[str, Callable[[], Backend]] = {
    "gpt2": lambda: byte_level(None),
    "llama3": lambda: byte_level(LLAMA3),
    "no words": lambda: pieces_kind(None, normalizers.Replace(" ", "\u2581")),
    "prepended": lambda: pieces_kind(
        None, normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    ),
    "metaspace": lambda: pieces_kind(pre_tokenizers.Metaspace(prepend_scheme="always"), None),
    "digits": lambda: byte_level(r"\p{N}|[^\p{N}\s]+|\s+"),
}


@pytest.fixture(scope="module", params=list(KINDS))
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer.from_files({"tokenizer.json": KINDS[request.param]().to_str().encode()})


WORDS = [
    *(word for line in CORPUS for word in line.split(" ")),
    *" \n\t\r,.'\"()<>|。、，\u0301\u00e9😀a1我",
    *("  ", "\n\n", "\r\n", "<|end|>", "[X] y", "[X]", "'s", "it's", "1234567", "aaaaaaaaa"),
]
TEXTS = st.lists(st.one_of(st.sampled_from(WORDS), st.sampled_from([" ", "\n", "a"])), max_size=120).map(
    "".join
)


@settings(max_examples=200, deadline=None)
@given(text=TEXTS, count=st.integers(1, 60), piece=st.integers(1, 40))
def test_pieces_and_ends_are_those_of_the_whole(
    tokenizer: Tokenizer, text: str, count: int, piece: int
) -> None:
    pieces = TextPieces(tokenizer.token_bytes(), piece_characters=piece)

    def encode(part: str) -> list[int]:
        return tokenizer.encode(part, add_special_tokens=False)

    whole = encode(text)
    assert finish(pieces.encode(text, encode)) == whole
    end, is_all = finish(pieces.encode_end(text * 40, count, encode))
    assert end[-count:] == encode(text * 40)[-count:]
    assert not is_all or end == encode(text * 40)


def test_long_texts_are_read_in_pieces_and_of_long_ones_only_the_end(tokenizer: Tokenizer) -> None:
    text = "".join(CORPUS) * 100
    (whole,) = tokenizer._backend.encode_batch([text])
    assert tokenizer.encode(text) == whole.ids
    num_steps = sum(1 for _ in tokenizer.encode_steps(text))
    assert num_steps >= len(text) // 12_000
    for count in (1, 30, 5_000):
        assert finish(tokenizer.encode_steps(text, keep=count)) == whole.ids[-count:]
    assert sum(1 for _ in tokenizer.encode_steps(text, keep=30)) == 1
    assert finish(tokenizer.encode_steps(text, keep=10**6)) == whole.ids


def test_a_text_without_the_end_of_a_word_is_refused(tokenizer: Tokenizer) -> None:
    longest = " ".ljust(MAX_UNCUT_CHARACTERS, "a")
    (whole,) = tokenizer._backend.encode_batch([f"b{longest}"])
    assert tokenizer.encode(f"b{longest}") == whole.ids
    with pytest.raises(InvalidRequest, match=r"too long a word.*limit=131072") as refused:
        tokenizer.encode(f"{longest}a")
    assert refused.value.too_large == "word"
    behind = "a" + " a b" * 1_000  # all that is read
    assert finish(tokenizer.encode_steps(longest + behind, keep=9)) == tokenizer.encode(behind)[-9:]


def test_of_a_long_word_not_much_is_read(tokenizer: Tokenizer) -> None:
    """Wherever it lies: at the end, or before the end that is to be encoded."""
    pieces = TextPieces(tokenizer.token_bytes())
    lengths = [0]

    def encode(part: str) -> list[int]:
        lengths.append(len(part))
        return tokenizer.encode(part, add_special_tokens=False)

    word = "a" * 4_000_000
    for text in (word, f"{word} {'b' * 1_030}"):
        with pytest.raises(InvalidRequest, match="too long a word") as refused:
            finish(pieces.encode_end(text, 2, encode))
        assert int(str(refused.value.fields["begins_at"])) > len(word) - 2 * MAX_UNCUT_CHARACTERS
        assert max(lengths) <= MAX_UNCUT_CHARACTERS


def test_no_token_stands_for_more_than_the_longest(tokenizer: Tokenizer) -> None:
    longest = tokenizer.longest_token_bytes
    assert longest is not None
    for text in (*CORPUS, "e\u0301" * 50, "\u1100\u1161\u11a8" * 50):
        assert len(text.encode()) <= longest * len(tokenizer.encode(text))
