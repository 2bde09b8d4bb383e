"""A model's tokens as the grammar library knows them: built once for each tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from llguidance import LLTokenizer, TokenizerWrapper

from pdserve.tokenizer import Tokenizer


class GrammarVocabulary:
    """Any thread may use it. Building takes 0.3 s for 49k tokens, 2 s for 262k.

    end_id     a token of its own behind all real ones: its bit in a mask says that the text may end here. The
               real ends (end-of-sequence, stop ids) are the request's, and are set from it.
    num_words  int32 words of the library's masks
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises InvalidRequest for a tokenizer whose tokens aren't bytes."""
        self._take(tokenizer.token_bytes(), sorted(tokenizer.special_ids))

    @classmethod
    def of_bytes(cls) -> Self:
        """One token a byte, without a model."""
        made = cls.__new__(cls)
        made._take([bytes((value,)) for value in range(256)], ())
        return made

    def _take(self, token_bytes: Sequence[bytes], special_ids: Sequence[int]) -> None:
        self.end_id = len(token_bytes)
        self.num_words = -(-(self.end_id + 1) // 32)
        table = _Table([*token_bytes, b"<|end|>"], self.end_id, [*special_ids, self.end_id])
        self.tokens = LLTokenizer(table, eos_token=[self.end_id])


class _Table(TokenizerWrapper):
    """What the library asks of a tokenizer. It never tokenizes: grammars are compiled with `no_forcing`."""

    def __init__(self, tokens: Sequence[bytes], end_id: int, special_ids: Sequence[int]) -> None:
        # Not the base's: it calls the tokenizer once to see what it takes.
        self.tokens = tokens
        self.eos_token_id = end_id
        self.bos_token_id = None
        self.special_token_ids = special_ids
        self.is_tokenizer_wrapper = True

    def __call__(self, text: bytes | str) -> list[int]:
        raise NotImplementedError("grammars don't force a spelling, so nothing is tokenized")
