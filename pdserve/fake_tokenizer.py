"""The tokenizer files of the fake engine's model."""

from __future__ import annotations

import json

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from pdserve.detokenizer import byte_spelling

_EOS = 256
_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def fake_files(vocab_size: int) -> dict[str, bytes]:
    """Ids 0–255 are the bytes, 256 is `<|eos|>`, further ones read `<257>` and so on."""
    if vocab_size <= _EOS:
        raise ValueError(f"a fake tokenizer needs a vocabulary of at least {_EOS + 1}, got {vocab_size}")
    vocab = {spelled: byte for byte, spelled in enumerate(byte_spelling())}
    vocab["<|eos|>"] = _EOS
    vocab.update({f"<{token_id}>": token_id for token_id in range(_EOS + 1, vocab_size)})
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|eos|>", normalized=False, special=True)])
    return {
        "tokenizer.json": backend.to_str().encode(),
        "tokenizer_config.json": json.dumps({"eos_token": "<|eos|>"}).encode(),
        "generation_config.json": json.dumps({"eos_token_id": [_EOS]}).encode(),
        "chat_template.jinja": _TEMPLATE.encode(),
    }
