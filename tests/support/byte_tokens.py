"""Tokenizers of a few chosen tokens, and the grammar vocabularies of them."""

from __future__ import annotations

import json
from collections.abc import Sequence

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from pdserve.detokenizer import byte_spelling
from pdserve.grammar.vocabulary import GrammarVocabulary
from pdserve.tokenizer import Tokenizer


def byte_tokenizer(tokens: Sequence[bytes], specials: Sequence[str] = ("<|eos|>",)) -> Tokenizer:
    """Ids in the order of `tokens`, then the special ones, the first of which is end-of-sequence."""
    spelling = byte_spelling()
    vocab = {"".join(spelling[byte] for byte in token): token_id for token_id, token in enumerate(tokens)}
    assert len(vocab) == len(tokens), "each token once"
    vocab |= {text: len(tokens) + number for number, text in enumerate(specials)}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in specials])
    return Tokenizer.from_files(
        {
            "tokenizer.json": backend.to_str().encode(),
            "tokenizer_config.json": json.dumps({"eos_token": specials[0]}).encode(),
        }
    )


def byte_vocabulary(tokens: Sequence[bytes]) -> GrammarVocabulary:
    """Of such a tokenizer; ids as above."""
    return GrammarVocabulary(byte_tokenizer(tokens))
