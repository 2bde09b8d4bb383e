"""Tokenizers from GGUF files equal transformers' of the same file: ids, text, and text as it streams."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest

from pdserve.modelstore.gguf_byte_level import SPLITS
from pdserve.modelstore.gguf_file import read_gguf
from pdserve.modelstore.gguf_tokenizer import tokenizer_config, tokenizer_json
from pdserve.tokenizer import Tokenizer
from tests.reference.texts import PICKED, drawn
from tests.support.vocabularies import Vocabulary, byte_level, gemma, llama

TEXTS = [*PICKED.values(), *drawn(500)]
# name: (architecture, vocabulary); the architecture tells SentencePiece's kinds apart
CASES: dict[str, tuple[str, Vocabulary]] = {
    **{f"gpt2 {pre}": ("qwen2", byte_level(pre, add_bos=False)) for pre in SPLITS},
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

    path = write(tmp_path_factory.mktemp("gguf") / "m.gguf", *CASES[request.param])
    return imported(path), AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)


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
    # Llama's kind puts a space before the text (and takes the text's own for it), Phi's also behind special tokens.
    adds_spaces = b'"Strip"' in ours.files["tokenizer.json"]
    for text in TEXTS:
        if "\u2581" in text or (adds_spaces and ("<" in text or text.startswith(" "))):
            continue
        ids = ours.encode(text, add_special_tokens=False)
        assert ours.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("name", ["gpt2 default", "llama", "llama without space", "phi3", "gemma3"])
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
    path = write(tmp_path / "m.gguf", "llama", vocabulary)
    theirs = AutoTokenizer.from_pretrained(str(tmp_path), gguf_file="m.gguf")
    ours = imported(path)
    assert all(ours.encode(text) == theirs(text).input_ids for text in TEXTS)
    assert ours.encode(TEXTS[0]) != imported(write(tmp_path / "n.gguf", "llama", plain)).encode(TEXTS[0])
