"""Byte-level BPE tokenizers (`gpt2`) of GGUF files, with named pre-tokenizers.

The result equals llama.cpp's, for which the files were written, and the models' own tokenizers; transformers' import of
GGUF files knows neither the digits of `smollm` nor words that are tokens whatever the merges say.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from pdserve.detokenizer import byte_spelling
from pdserve.errors import Incompatible
from pdserve.modelstore.gguf_file import GgufFile
from pdserve.modelstore.gguf_types import USER_DEFINED


@dataclass(frozen=True, slots=True)
class _Words:
    """How text is cut into words before merging.

    splits          regexes, one after the other: each cuts what the one before has left; as the models' own tokenizers
                    publish them
    ignores_merges  a word that is a token is that token, whatever the merges would make of it
    adds_begin      files that don't say it mean that text gets the begin-of-sequence token
    """

    splits: tuple[str, ...]
    ignores_merges: bool = False
    adds_begin: bool = False


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SUFFIX = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_THREE_DIGITS = "[0-9][0-9][0-9]"

_OF_GPT2 = _Words((_GPT2,))
_OF_DIGITS = _Words((r"\p{N}", _GPT2))
_OF_LLAMA3 = _Words((_LLAMA3,), ignores_merges=True, adds_begin=True)
WORDS: dict[str, _Words] = {
    "default": _Words((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", _THREE_DIGITS)),
    "falcon": _Words((r"[\p{P}$+<=>^~|`]+", _GPT2, _THREE_DIGITS)),
    "gpt-2": _OF_GPT2,
    "mpt": _OF_GPT2,
    "smollm": _OF_DIGITS,
    "starcoder": _OF_DIGITS,
    "refact": _OF_DIGITS,
    "command-r": _OF_DIGITS,
    "llama-bpe": _OF_LLAMA3,
    "llama3": _OF_LLAMA3,
    "llama-v3": _OF_LLAMA3,
    "falcon3": _OF_LLAMA3,
    "pixtral": _OF_LLAMA3,
    "smaug-bpe": _Words((_LLAMA3,)),
    "dbrx": _Words((_LLAMA3,)),
    "tekken": _Words((_TEKKEN,), ignores_merges=True, adds_begin=True),
    "qwen2": _Words((_QWEN2,)),
    "deepseek-r1-qwen": _Words((_QWEN2,)),
    "gpt-4o": _Words((_GPT4O,)),
}


def byte_level(file: GgufFile) -> Tokenizer:
    """Vocabulary, merges, pre-tokenizer and decoder; tokens of special meaning come later.

    Raises Incompatible for a pre-tokenizer that isn't known, by name, and for merges that don't fit.
    """
    words = words_of(file)
    tokenizer = Tokenizer(_bpe(file, ignores_merges=words.ignores_merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(split), behavior="isolated") for split in words.splits),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def words_of(file: GgufFile) -> _Words:
    """By the pre-tokenizer that the file names. Raises Incompatible for one that isn't known."""
    pre = file.typed("tokenizer.ggml.pre", str, "default")
    if pre not in WORDS:
        raise Incompatible("GGUF pre-tokenizer is not supported", got=pre, supported=", ".join(WORDS))
    return WORDS[pre]


def merge_pairs(merges: list[str]) -> list[tuple[str, str]]:
    """Merges as files write them, two tokens with a space between. Raises Incompatible for anything else."""
    pairs = []
    for merge in merges:
        left, space, right = merge.partition(" ")
        if not space or " " in right:
            raise Incompatible("GGUF merge is not a pair of tokens", merge=merge)
        pairs.append((left, right))
    return pairs


def _bpe(file: GgufFile, *, ignores_merges: bool) -> models.BPE:
    spelling = byte_spelling()
    alphabet = frozenset(spelling)
    tokens = file.tokens()
    types = file.listed("tokenizer.ggml.token_type", int, []) or [0] * len(tokens)
    vocab: dict[str, int] = {}
    for token_id, (token, kind) in enumerate(zip(tokens, types, strict=False)):
        # User-defined tokens are found in the text itself, before it is spelled.
        as_written = kind == USER_DEFINED or alphabet.issuperset(token)
        vocab[token if as_written else "".join(spelling[byte] for byte in token.encode())] = token_id
    try:
        return models.BPE(
            vocab=vocab,
            merges=merge_pairs(file.listed("tokenizer.ggml.merges", str)),
            dropout=None,
            continuing_subword_prefix="",
            end_of_word_suffix="",
            fuse_unk=False,
            ignore_merges=ignores_merges,
        )
    except Incompatible:
        raise
    except Exception as error:  # the package raises plain Exception, e.g. for a merge outside the vocabulary
        raise Incompatible(
            "GGUF vocabulary and merges don't fit together", why=" ".join(str(error).split())
        ) from error
