"""The first tokens of a compiled structure: what breaks there is refused before anybody waits for it."""

from __future__ import annotations

import random
from collections.abc import Sequence

from pdserve.errors import InvalidRequest, RowFailed
from pdserve.grammar.matcher import CompiledStructure
from pdserve.grammar.vocabulary import GrammarVocabulary
from pdserve.structure import Structure
from pdserve.token_mask import ids_of

NUM_WALKS = 3
MOST_TOKENS = 40
_OPENING = b'"{[,:0'  # leads a text of JSON through its structure, rather than along one of its strings


def walk(structure: Structure, compiled: CompiledStructure, vocabulary: GrammarVocabulary) -> None:
    """Follow a structure of bytes along a few texts, the same ones each time.

    Raises InvalidRequest if the library gives up on one of them, or needs too long.
    """
    for number in range(NUM_WALKS):
        matcher = compiled.matcher((vocabulary.end_id,))
        draw = random.Random(number)
        try:
            for _ in range(MOST_TOKENS):
                allowed = [each for each in ids_of(matcher.mask()) if each < 256]
                if not allowed:
                    break
                matcher.take(_next(allowed, draw if number else None))
                if matcher.is_complete:
                    break
        except RowFailed as error:
            raise InvalidRequest(
                f"{structure.kind.value} is too complex", why=error.fields.get("why", error.message)
            ) from None


def _next(allowed: Sequence[int], draw: random.Random | None) -> int:
    if draw is not None:
        return draw.choice(allowed)
    return next((byte for byte in _OPENING if byte in allowed), allowed[-1])
