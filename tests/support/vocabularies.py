"""Small vocabularies as GGUF files hold them, trained on a few sentences."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import gguf
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from pdserve.detokenizer import byte_spelling

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
SENTENCES = (
    "The quick brown fox jumps over the lazy dog, then the fox thinks about the other dogs.",
    "There is nothing either good or bad, but thinking makes it so; this is the question.",
    "def add(left: int, right: int) -> int:\n    return left + right  # 123 456",
    "Fünf große Äpfel liegen über der Straße, und die Übrigen fallen herunter.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "天地玄黃,宇宙洪荒。日月盈昃,辰宿列張。いろはにほへと ちりぬるを",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """What a GGUF file says about its tokenizer.

    scores, merges  None: not written
    """

    model: str
    pre: str | None = None
    tokens: Sequence[str]
    types: Sequence[int]
    scores: Sequence[float] | None = None
    merges: Sequence[str] | None = None
    named: dict[str, int] = field(default_factory=dict)
    add_bos: bool | None = None
    add_space_prefix: bool | None = None
    template: str | None = None

    def metadata(self) -> dict[str, Any]:
        """What stands under `tokenizer.ggml.` in a file."""
        facts = {
            "model": self.model,
            "pre": self.pre,
            "tokens": list(self.tokens),
            "token_type": list(self.types),
            "scores": None if self.scores is None else list(self.scores),
            "merges": None if self.merges is None else list(self.merges),
            "add_bos_token": self.add_bos,
            "add_space_prefix": self.add_space_prefix,
            **{f"{key}_token_id": token_id for key, token_id in self.named.items()},
        }
        return {key: value for key, value in facts.items() if value is not None}

    def with_tokens(self, tokens: Sequence[str], kind: int) -> Vocabulary:
        """The same with tokens at its end that nothing else knows."""
        return replace(self, tokens=[*self.tokens, *tokens], types=[*self.types, *[kind] * len(tokens)])

    def write(self, writer: gguf.GGUFWriter) -> None:
        """Put it into a file's metadata."""
        writer.add_tokenizer_model(self.model)
        if self.pre is not None:
            writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(list(self.tokens))
        writer.add_token_types(list(self.types))
        if self.scores is not None:
            writer.add_token_scores(list(self.scores))
        if self.merges is not None:
            writer.add_token_merges(list(self.merges))
        for key, token_id in self.named.items():
            writer.add_uint32(f"tokenizer.ggml.{key}_token_id", token_id)
        if self.add_bos is not None:
            writer.add_add_bos_token(self.add_bos)
        if self.add_space_prefix is not None:
            writer.add_add_space_prefix(self.add_space_prefix)
        if self.template is not None:
            writer.add_chat_template(self.template)


def byte_level(pre: str = "gpt-2", *, size: int = 500, add_bos: bool | None = None) -> Vocabulary:
    """GPT-2's kind: three control tokens, one user-defined, bytes, trained merges."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=size - 4, initial_alphabet=byte_spelling(), show_progress=False)
    trained.train_from_iterator(SENTENCES, trainer)
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = [*control, *_by_id(trained), "<think>"]
    return Vocabulary(
        model="gpt2",
        pre=pre,
        tokens=tokens,
        types=[CONTROL] * 3 + [NORMAL] * (len(tokens) - 4) + [USER_DEFINED],
        merges=_merges_of(trained),
        named={"bos": 1, "eos": 2},
        add_bos=add_bos,
    )


def llama(
    *, size: int = 600, add_space_prefix: bool | None = None, add_bos: bool | None = None
) -> Vocabulary:
    """Llama 2's kind: unknown, begin, end, 256 bytes, trained pieces with falling scores."""
    pieces = _pieces(size - 261)
    tokens = ["<unk>", "<s>", "</s>", *_bytes(), "<|user|>", "<tool>", *pieces]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, CONTROL, USER_DEFINED, *[NORMAL] * len(pieces)]
    scores = [0.0] * 261 + [-float(rank) for rank in range(len(pieces))]
    return Vocabulary(
        model="llama",
        pre="default",
        tokens=tokens,
        types=types,
        scores=scores,
        named={"bos": 1, "eos": 2, "unknown": 0},
        add_bos=add_bos,
        add_space_prefix=add_space_prefix,
    )


def gemma(*, size: int = 640) -> Vocabulary:
    """Gemma's kind: runs of spaces and newlines are user-defined tokens, scores say nothing."""
    control = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>"]
    newlines = ["\n" * count for count in range(1, 6)]
    spaces = [" " * count for count in range(2, 12)]  # written as spaces, meant as ▁▁
    pieces = [piece for piece in _pieces(size - 280) if piece not in newlines and piece.strip("\u2581")]
    tokens = [*control, *newlines, *spaces, *_bytes(), *pieces, "\u2581"]
    types = [CONTROL] * 7 + [USER_DEFINED] * 15 + [BYTE] * 256 + [NORMAL] * (len(pieces) + 1)
    return Vocabulary(
        model="llama",
        pre="default",
        tokens=tokens,
        types=types,
        scores=[-1000.0] * len(tokens),
        named={"pad": 0, "eos": 1, "bos": 2, "unknown": 3},
        add_bos=True,
        add_space_prefix=False,
    )


def _pieces(count: int) -> list[str]:
    """Pieces of words that begin with ▁: merged ones first, best first, then the single characters."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(SENTENCES, trainers.BpeTrainer(vocab_size=count, show_progress=False))
    by_id = _by_id(trained)
    return [piece for piece in by_id if len(piece) > 1] + [piece for piece in by_id if len(piece) == 1]


def _bytes() -> list[str]:
    return [f"<0x{byte:02X}>" for byte in range(256)]


def _by_id(tokenizer: Tokenizer) -> list[str]:
    vocab = tokenizer.get_vocab()
    return sorted(vocab, key=lambda token: vocab[token])


def _merges_of(tokenizer: Tokenizer) -> list[str]:
    return [" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
