"""A compiled structure, and how far one choice has come in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from pdserve.clock import thread_cpu_s
from pdserve.errors import RowFailed
from pdserve.grammar.vocabulary import GrammarVocabulary
from pdserve.token_mask import TokenMask

# Masks are made between two steps of the engine, for all sequences of the batch: what one of them takes, all wait for.
# Usual structures need 0.02 to 0.2 ms a token, recursive GBNF up to 4; ambiguous grammars more with each token, up to a
# second.
CPU_S_PER_TOKEN = 0.01
FIRST_CPU_S = 0.2  # that may be taken in advance
_MOST_CHARACTERS = 200  # of the library's own words


class CompiledStructure:
    """Gives matchers. One thread at a time."""

    def __init__(
        self, prototype: LLMatcher, vocabulary: GrammarVocabulary, cpu_s: Callable[[], float] = thread_cpu_s
    ) -> None:
        self._prototype = prototype
        self._vocabulary = vocabulary
        self._cpu_s = cpu_s

    def matcher(self, ends: Sequence[int], token_ids: Sequence[int] = ()) -> GrammarMatcher:
        """A new one at the beginning, or behind these ids.

        ends  ids that may follow where the text may end
        Raises RowFailed if the ids are no beginning of a text.
        """
        matcher = GrammarMatcher(self._prototype.deep_copy(), self._vocabulary, ends, self._cpu_s)
        for token_id in token_ids:
            matcher.take(token_id)
        return matcher


class GrammarMatcher:
    """The port `TokenMatcher` over the library."""

    def __init__(
        self,
        inner: LLMatcher,
        vocabulary: GrammarVocabulary,
        ends: Sequence[int],
        cpu_s: Callable[[], float],
    ) -> None:
        self._cpu_s = cpu_s
        self._inner = inner
        self._vocabulary = vocabulary
        self._ends = ends
        # A model may have more ids than its tokenizer, and a stop id among them.
        self._num_words = max(vocabulary.num_words, max(ends, default=0) // 32 + 1)
        self._left_s = FIRST_CPU_S

    @property
    def is_complete(self) -> bool:
        return self._inner.is_stopped() and not self._inner.is_error()

    def mask(self) -> TokenMask:
        words = np.zeros(self._num_words, dtype=np.int32)
        begun_s = self._cpu_s()
        self._inner.unsafe_compute_mask_ptr(words.ctypes.data, 4 * self._vocabulary.num_words)
        self._spend(self._cpu_s() - begun_s)
        if self._inner.is_error():
            raise RowFailed(
                "the structure became too complex during generation", why=library_words(self._inner)
            )
        bits = words.view(np.uint32)
        may_end = _has(bits, self._vocabulary.end_id)
        _remove(bits, self._vocabulary.end_id)
        for token_id in self._ends:  # some may be text as well: only a whole text is ended by them
            (_add if may_end else _remove)(bits, token_id)
        return words

    def take(self, token_id: int) -> None:
        begun_s = self._cpu_s()
        taken = self._inner.consume_token(token_id)
        self._spend(self._cpu_s() - begun_s - CPU_S_PER_TOKEN)
        if not taken:
            raise RowFailed(
                "a token that the structure doesn't allow", token_id=token_id, why=library_words(self._inner)
            )

    def _spend(self, seconds: float) -> None:
        self._left_s = min(FIRST_CPU_S, self._left_s - seconds)
        if self._left_s < 0:
            raise RowFailed(
                "the structure became too complex during generation",
                why=f"it takes more than {CPU_S_PER_TOKEN * 1000:g} ms of computing a token",
            )


def library_words(matcher: LLMatcher) -> str:
    """The first line of what the library says of its error; the rest shows its inner state."""
    return matcher.get_error().split("\n", 1)[0][:_MOST_CHARACTERS]


Bits = npt.NDArray[np.uint32]


def _has(bits: Bits, token_id: int) -> bool:
    return bool(bits[token_id // 32] >> np.uint32(token_id % 32) & np.uint32(1))


def _add(bits: Bits, token_id: int) -> None:
    bits[token_id // 32] |= np.uint32(1) << np.uint32(token_id % 32)


def _remove(bits: Bits, token_id: int) -> None:
    bits[token_id // 32] &= ~(np.uint32(1) << np.uint32(token_id % 32))
