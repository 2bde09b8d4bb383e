"""`tokenizer.json` and its companions from GGUF metadata: byte-level BPE with named pre-tokenizers.

The result equals what transformers makes of the same file (`AutoTokenizer.from_pretrained(gguf_file=…)`), which is
also why `smollm` splits digits by the merges alone: the reference knows no separate rule for it.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from pdserve.detokenizer import byte_spelling
from pdserve.errors import Incompatible
from pdserve.modelstore.gguf_file import GgufFile

_CONTROL, _USER_DEFINED = 3, 4

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
# None: GPT-2's own rule, which the ByteLevel step brings along.
_SPLITS: dict[str, str | None] = {
    "default": None,
    "gpt-2": None,
    "smollm": None,
    "llama-bpe": _LLAMA3_SPLIT,
    "qwen2": _QWEN2_SPLIT,
}
# Files written before `add_bos_token` existed mean "yes" for these.
_BOS_UNLESS_SAID = ("llama-bpe",)
_NAMED = (
    ("bos_token", "bos_token_id"),
    ("eos_token", "eos_token_id"),
    ("unk_token", "unknown_token_id"),
    ("pad_token", "padding_token_id"),
)


def tokenizer_json(file: GgufFile) -> str:
    """The file's tokenizer in the format of the `tokenizers` package.

    Raises Incompatible for a tokenizer model or pre-tokenizer that isn't supported, by name.
    """
    model = file.need("tokenizer.ggml.model")
    if model != "gpt2":
        raise Incompatible("GGUF tokenizer is not supported", got=model, supported="gpt2")
    pre = str(file.metadata.get("tokenizer.ggml.pre", "default"))
    if pre not in _SPLITS:
        raise Incompatible("GGUF pre-tokenizer is not supported", got=pre, supported=", ".join(_SPLITS))
    tokens: list[str] = file.need("tokenizer.ggml.tokens")
    tokenizer = Tokenizer(_byte_level_bpe(tokens, file.need("tokenizer.ggml.merges")))
    split = _SPLITS[pre]
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
    _add_marked_tokens(tokenizer, file, tokens)
    _add_ends(tokenizer, tokenizer_config(file))
    return str(tokenizer.to_str())


def tokenizer_config(file: GgufFile) -> dict[str, Any]:
    """`tokenizer_config.json`: the named tokens and whether text gets them."""
    tokens: list[str] = file.need("tokenizer.ggml.tokens")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bool(
            file.metadata.get(
                "tokenizer.ggml.add_bos_token", file.metadata.get("tokenizer.ggml.pre") in _BOS_UNLESS_SAID
            )
        ),
        "add_eos_token": bool(file.metadata.get("tokenizer.ggml.add_eos_token", False)),
    }
    for name, key in _NAMED:
        token_id = file.metadata.get(f"tokenizer.ggml.{key}")
        if token_id is None:
            continue
        if not 0 <= int(token_id) < len(tokens):
            raise Incompatible(
                "GGUF special token outside the vocabulary", key=key, got=token_id, tokens=len(tokens)
            )
        config[name] = tokens[int(token_id)]
    if file.own("context_length") is not None:
        config["model_max_length"] = int(file.own("context_length"))
    return config


def _byte_level_bpe(tokens: list[str], merges: list[str]) -> models.BPE:
    spelling = byte_spelling()
    alphabet = frozenset(spelling)
    vocab: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        spelled = token if alphabet.issuperset(token) else "".join(spelling[byte] for byte in token.encode())
        vocab[spelled] = token_id
    pairs = []
    for merge in merges:
        left, space, right = merge.partition(" ")
        if not space or " " in right:
            raise Incompatible("GGUF merge is not a pair of tokens", merge=merge)
        pairs.append((left, right))
    try:
        return models.BPE(
            vocab=vocab,
            merges=pairs,
            dropout=None,
            continuing_subword_prefix="",
            end_of_word_suffix="",
            fuse_unk=False,
        )
    except Exception as error:  # the package raises plain Exception, e.g. for a merge outside the vocabulary
        raise Incompatible(
            "GGUF vocabulary and merges don't fit together", why=" ".join(str(error).split())
        ) from error


def _add_marked_tokens(tokenizer: Tokenizer, file: GgufFile, tokens: list[str]) -> None:
    """Control tokens stay whole and are special, user-defined ones stay whole.

    A "control" token outside the byte alphabet is a mislabelled ordinary one in known files: left as it is.
    """
    types: list[int] = file.metadata.get("tokenizer.ggml.token_type", [])
    alphabet = frozenset(byte_spelling())
    marked = list(zip(tokens, types, strict=False))
    control = [token for token, kind in marked if kind == _CONTROL and alphabet.issuperset(token)]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    own = [
        token for token, kind in marked if kind == _USER_DEFINED and tokenizer.token_to_id(token) is not None
    ]
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in own])


def _add_ends(tokenizer: Tokenizer, config: dict[str, Any]) -> None:
    """Name the special tokens, and put begin and end around text where the file says so."""
    named = {config[name]: None for name, _ in _NAMED if name in config}
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in named])
    bos = config.get("bos_token") if config["add_bos_token"] else None
    eos = config.get("eos_token") if config["add_eos_token"] else None
    around = [token for token in (bos, eos) if token is not None]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{f'{bos}:0 ' if bos else ''}$A:0{f' {eos}:0' if eos else ''}",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in dict.fromkeys(around)],
    )
