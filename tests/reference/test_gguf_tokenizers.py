"""Tokenizers from GGUF files equal transformers' of the same file: ids, text, and text as it streams.

Where transformers' import leaves rules out, ours is compared with the rules as the models' own tokenizers write them;
`make test-vocabularies` compares with llama.cpp.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers

from pdserve.modelstore.gguf_byte_level import WORDS
from pdserve.modelstore.gguf_file import read_gguf
from pdserve.modelstore.gguf_tokenizer import tokenizer_config, tokenizer_json
from pdserve.tokenizer import Tokenizer
from tests.reference.texts import PICKED, drawn
from tests.support.vocabularies import Vocabulary, byte_level, gemma, llama

TEXTS = [*PICKED.values(), *drawn(500)]
CUT_DIGITS = ("default", "falcon", "smollm", "starcoder", "refact", "command-r")  # which transformers doesn't
# name: (architecture, vocabulary); the architecture tells SentencePiece's kinds apart
CASES: dict[str, tuple[str, Vocabulary]] = {
    **{f"gpt2 {pre}": ("qwen2", byte_level(pre, add_bos=False)) for pre in WORDS if pre not in CUT_DIGITS},
    "gpt2 with begin": ("llama", byte_level("llama-bpe", add_bos=True)),
    "llama": ("llama", llama()),
    "llama without begin": ("llama", llama(add_bos=False)),
    "phi3": ("phi3", llama()),
    "gemma3": ("gemma3", gemma()),
}


def write(path: Path, architecture: str, vocabulary: Vocabulary) -> Path:
    """A GGUF file with a tokenizer, the facts that transformers wants to see, and no tensors."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    vocabulary.write(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def imported(path: Path) -> Tokenizer:
    file = read_gguf(path)
    return Tokenizer.from_files(
        {
            "tokenizer.json": tokenizer_json(file).encode(),
            "tokenizer_config.json": json.dumps(tokenizer_config(file)).encode(),
        }
    )


@pytest.fixture(scope="module", params=CASES)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    """Ours and transformers'."""
    from transformers import AutoTokenizer

    architecture, vocabulary = CASES[request.param]
    folder = tmp_path_factory.mktemp("gguf")
    ours = imported(write(folder / "m.gguf", architecture, vocabulary))
    # For llama.cpp, as in Llama 2's own tokenizer.json, the spaces of the two are alike; for transformers, Phi's are.
    write(
        folder / "m.gguf",
        "phi3" if architecture == "llama" and vocabulary.model == "llama" else architecture,
        vocabulary,
    )
    return ours, AutoTokenizer.from_pretrained(str(folder), gguf_file="m.gguf")


def test_ids_and_text_are_equal(both: tuple[Tokenizer, Any]) -> None:
    ours, theirs = both
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs(text).input_ids, text
        assert ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False).input_ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids), text


def test_ids_give_the_text_back(both: tuple[Tokenizer, Any]) -> None:
    ours, _ = both
    # Llama's kind puts a space behind special tokens.
    adds_spaces = b'"Strip"' in ours.files["tokenizer.json"]
    for text in TEXTS:
        if "\u2581" in text or (adds_spaces and "<" in text):
            continue
        ids = ours.encode(text, add_special_tokens=False)
        assert ours.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("pre", ["smollm", "starcoder", "refact", "command-r"])
def test_each_digit_is_a_word(pre: str, tmp_path: Path) -> None:
    """As SmolLM2's own tokenizer.json: digits one by one, then GPT-2's words."""
    vocabulary = byte_level(pre, add_bos=False)
    ours = imported(write(tmp_path / "m.gguf", "llama", vocabulary))
    theirs = Backend.from_buffer(ours.files["tokenizer.json"])
    theirs.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in [*TEXTS, "if x:\n    4", "a 12  3\n\n 45"]:
        assert ours.encode(text) == theirs.encode(text).ids, text


@pytest.mark.parametrize("name", ["gpt2 gpt-2", "llama", "llama without space", "phi3", "gemma3"])
def test_streamed_text_equals_the_whole_at_every_split(name: str, tmp_path: Path) -> None:
    case = ("llama", llama(add_space_prefix=False)) if name == "llama without space" else CASES[name]
    ours = imported(write(tmp_path / "m.gguf", *case))
    for index, text in enumerate(TEXTS):
        ids = ours.encode(text)
        whole = ours.decode(ids)
        stream = ours.stream()
        assert "".join([stream.step([token_id]) for token_id in ids]) + stream.flush() == whole
        if index % 10 == 0 and len(ids) < 300:
            for split in range(len(ids) + 1):
                stream = ours.stream()
                assert stream.step(ids[:split]) + stream.step(ids[split:]) + stream.flush() == whole


def _merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    from transformers.tokenization_utils_base import generate_merges

    assert vocabulary.scores is not None
    vocab = {token: token_id for token_id, token in enumerate(vocabulary.tokens)}
    scores = dict(zip(vocabulary.tokens, vocabulary.scores, strict=True))
    merges: list[tuple[str, str]] = generate_merges(vocab, scores)
    return merges


def test_llama_without_a_space_before_the_text(tmp_path: Path) -> None:
    """transformers' own GGUF import doesn't look at this flag; its tokenizer class can do it."""
    from transformers import LlamaTokenizer

    vocabulary = llama(add_space_prefix=False, add_bos=False)
    ours = imported(write(tmp_path / "m.gguf", "llama", vocabulary))
    theirs = LlamaTokenizer(
        vocab={token: token_id for token_id, token in enumerate(vocabulary.tokens)},
        merges=_merges(vocabulary),
        add_prefix_space=False,
        additional_special_tokens=["<|user|>"],
    )
    theirs.add_tokens(["<tool>"])
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs(text).input_ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.decode(ours.encode(" a")) == " a"


def test_merges_in_the_file_go_before_scores(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    plain = llama()
    vocabulary = Vocabulary(
        model="llama", tokens=plain.tokens, types=plain.types, scores=plain.scores, named=plain.named,
        merges=[" ".join(pair) for pair in _merges(plain)[:40]],
    )  # fmt: skip
    path = write(tmp_path / "m.gguf", "phi3", vocabulary)  # which transformers gives the same spaces as we do
    theirs = AutoTokenizer.from_pretrained(str(tmp_path), gguf_file="m.gguf")
    ours = imported(path)
    assert all(ours.encode(text) == theirs(text).input_ids for text in TEXTS)
    assert ours.encode(TEXTS[0]) != imported(write(tmp_path / "n.gguf", "llama", plain)).encode(TEXTS[0])
