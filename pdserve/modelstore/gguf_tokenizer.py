"""`tokenizer.json`, `tokenizer_config.json` and named chat templates from GGUF metadata."""

from __future__ import annotations

import re
from typing import Any

from tokenizers import AddedToken, Tokenizer, processors

from pdserve.detokenizer import byte_spelling
from pdserve.errors import Incompatible
from pdserve.modelstore.gguf_byte_level import byte_level, words_of
from pdserve.modelstore.gguf_file import GgufFile
from pdserve.modelstore.gguf_sentencepiece import sentencepiece
from pdserve.modelstore.gguf_types import CONTROL, USER_DEFINED

_MAKERS = {"gpt2": byte_level, "llama": sentencepiece}
_NAMED = (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding"))
_TEMPLATE_KEY = re.compile(r"tokenizer\.chat_template\.([A-Za-z0-9_-]{1,64})")


def tokenizer_json(file: GgufFile) -> str:
    """The file's tokenizer in the format of the `tokenizers` package.

    Raises Incompatible for a tokenizer model or pre-tokenizer that isn't supported, by name.
    """
    model = file.typed("tokenizer.ggml.model", str)
    if model not in _MAKERS:
        raise Incompatible("GGUF tokenizer is not supported", got=model, supported=", ".join(_MAKERS))
    config = tokenizer_config(file)
    tokenizer = _MAKERS[model](file)
    _add_marked_tokens(tokenizer, file, is_byte_level=model == "gpt2")
    _add_ends(tokenizer, config)
    return str(tokenizer.to_str())


def tokenizer_config(file: GgufFile) -> dict[str, Any]:
    """`tokenizer_config.json`: the named tokens and whether text gets them."""
    tokens = file.tokens()
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": file.typed("tokenizer.ggml.add_bos_token", bool, _adds_bos_unsaid(file)),
        "add_eos_token": file.typed("tokenizer.ggml.add_eos_token", bool, False),
    }
    for name, key in _NAMED:
        token_id = file.token_id(key)
        if token_id is not None:
            config[name] = tokens[token_id]
    context = file.typed(file.key("context_length"), int, 0)
    if context:
        config["model_max_length"] = context
    return config


def named_templates(file: GgufFile) -> dict[str, str]:
    """The chat templates beside the default one, e.g. `tool_use`."""
    found = ((_TEMPLATE_KEY.fullmatch(key), value) for key, value in file.metadata.items())
    return {match[1]: str(value) for match, value in found if match is not None}


def _adds_bos_unsaid(file: GgufFile) -> bool:
    """What files mean that were written before `add_bos_token` existed."""
    return file.metadata.get("tokenizer.ggml.model") == "llama" or words_of(file).adds_begin


def _add_marked_tokens(tokenizer: Tokenizer, file: GgufFile, *, is_byte_level: bool) -> None:
    """Control tokens stay whole and are special, user-defined ones stay whole.

    In a byte-level vocabulary, a "control" token outside the byte alphabet is a mislabelled ordinary one in known
    files: left as it is. In Gemma's, runs of spaces are user-defined, but spelled otherwise in the vocabulary: left to
    the merges.
    """
    types = file.listed("tokenizer.ggml.token_type", int, [])
    alphabet = frozenset(byte_spelling())
    marked = list(zip(file.tokens(), types, strict=False))
    control = [
        token
        for token, kind in marked
        if kind == CONTROL and token and (not is_byte_level or alphabet.issuperset(token))
    ]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    own = [
        token for token, kind in marked if kind == USER_DEFINED and tokenizer.token_to_id(token) is not None
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
        single=[*([bos] if bos else []), "$A", *([eos] if eos else [])],
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in dict.fromkeys(around)],
    )
