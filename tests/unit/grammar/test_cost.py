"""What a structure may cost: each token's computing while it is followed, and its first tokens before it is."""

from __future__ import annotations

import re

import pytest

from pdserve.errors import InvalidRequest, RowFailed
from pdserve.grammar.compiler import compile_structure
from pdserve.grammar.matcher import CPU_S_PER_TOKEN, FIRST_CPU_S
from pdserve.grammar.vocabulary import GrammarVocabulary
from pdserve.grammar.walk import walk
from pdserve.structure import Structure
from tests.support.structures import WISHES, Wish

VOCABULARY = GrammarVocabulary.of_bytes()
AMBIGUOUS = Structure.grammar('start: s\ns: "a" | s s | s s s | s "b" s | (s "c")*')
MANY = {"type": "object", "properties": {f"p{number}": {"type": "integer"} for number in range(1500)}}


class Spent:
    """A thread's clock: each look at it costs so much."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += self._step_s
        return self.now_s


def follow(step_s: float, num_tokens: int) -> None:
    matcher = compile_structure(Structure.regex("a*"), VOCABULARY, Spent(step_s)).matcher(())
    for _ in range(num_tokens):
        matcher.mask()
        matcher.take(ord("a"))


def test_what_computes_too_long_for_each_token_is_given_up() -> None:
    """A mask and a token taken in cost a step of the clock each."""
    follow(CPU_S_PER_TOKEN / 2.1, 10_000)
    dear = 5 * CPU_S_PER_TOKEN
    num_tokens = int(FIRST_CPU_S / (2 * dear - CPU_S_PER_TOKEN))
    follow(dear, num_tokens)
    with pytest.raises(RowFailed, match="it takes more than 10 ms of computing a token"):
        follow(dear, num_tokens + 1)
    with pytest.raises(InvalidRequest, match="regex is too complex"):
        follow(FIRST_CPU_S * 1.1, 1)


def test_an_ambiguous_grammar_ends_soon() -> None:
    """Its tokens would cost more and more, up to a second each."""
    matcher = compile_structure(AMBIGUOUS, VOCABULARY).matcher(())
    with pytest.raises(RowFailed, match="structure became too complex during generation"):
        for _ in range(400):
            matcher.mask()
            matcher.take(ord("a"))


@pytest.mark.parametrize(
    "schema", [MANY, {"type": "object", "properties": {"a": MANY}, "required": ["a"]}], ids=["flat", "inside"]
)
def test_what_compiles_but_breaks_at_its_first_tokens_is_too_complex(schema: dict[str, object]) -> None:
    structure = Structure.json_schema(schema)
    compiled = compile_structure(structure, VOCABULARY)
    with pytest.raises(InvalidRequest, match=re.escape("json_schema is too complex (why=Parser Error:")):
        walk(structure, compiled, VOCABULARY)


@pytest.mark.parametrize("wish", WISHES, ids=lambda wish: wish.name)
def test_usual_structures_are_walked_through(wish: Wish) -> None:
    walk(wish.structure, compile_structure(wish.structure, VOCABULARY), VOCABULARY)
