"""Byte-level BPE tokenizers (`gpt2`) of GGUF files, with named pre-tokenizers.

The result equals what transformers makes of the same file (`AutoTokenizer.from_pretrained(gguf_file=…)`), which is
also why `smollm` splits digits by the merges alone: the reference knows no separate rule for it.
"""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from pdserve.detokenizer import byte_spelling
from pdserve.errors import Incompatible
from pdserve.modelstore.gguf_file import GgufFile

# How text is cut into words before merging, as the models' own tokenizers publish it.
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
# None: GPT-2's own rule, which the ByteLevel step brings along.
SPLITS: dict[str, str | None] = {
    "default": None,
    "gpt-2": None,
    "smollm": None,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "pixtral": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "dbrx": _LLAMA3,
    "tekken": _TEKKEN,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "gpt-4o": _GPT4O,
}


def byte_level(file: GgufFile) -> Tokenizer:
    """Vocabulary, merges, pre-tokenizer and decoder; tokens of special meaning come later.

    Raises Incompatible for a pre-tokenizer that isn't known, by name, and for merges that don't fit.
    """
    pre = file.typed("tokenizer.ggml.pre", str, "default")
    if pre not in SPLITS:
        raise Incompatible("GGUF pre-tokenizer is not supported", got=pre, supported=", ".join(SPLITS))
    tokenizer = Tokenizer(_bpe(file.tokens(), file.listed("tokenizer.ggml.merges", str)))
    split = SPLITS[pre]
    if split is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(split), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def merge_pairs(merges: list[str]) -> list[tuple[str, str]]:
    """Merges as files write them, two tokens with a space between. Raises Incompatible for anything else."""
    pairs = []
    for merge in merges:
        left, space, right = merge.partition(" ")
        if not space or " " in right:
            raise Incompatible("GGUF merge is not a pair of tokens", merge=merge)
        pairs.append((left, right))
    return pairs


def _bpe(tokens: list[str], merges: list[str]) -> models.BPE:
    spelling = byte_spelling()
    alphabet = frozenset(spelling)
    vocab: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        spelled = token if alphabet.issuperset(token) else "".join(spelling[byte] for byte in token.encode())
        vocab[spelled] = token_id
    try:
        return models.BPE(
            vocab=vocab,
            merges=merge_pairs(merges),
            dropout=None,
            continuing_subword_prefix="",
            end_of_word_suffix="",
            fuse_unk=False,
        )
    except Incompatible:
        raise
    except Exception as error:  # the package raises plain Exception, e.g. for a merge outside the vocabulary
        raise Incompatible(
            "GGUF vocabulary and merges don't fit together", why=" ".join(str(error).split())
        ) from error
