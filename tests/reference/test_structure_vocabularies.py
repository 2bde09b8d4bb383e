"""Masks over the packaged models' vocabularies: a token may follow if and only if the bytes that we show for it can."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from pdserve import modelstore
from pdserve.errors import UnknownModel
from pdserve.grammar.compiler import compile_structure
from pdserve.grammar.vocabulary import GrammarVocabulary
from pdserve.structure import Structure
from pdserve.token_mask import ids_of
from pdserve.tokenizer import Tokenizer
from tests.support.list_matcher import ListMatcher
from tests.support.structures import WISHES, Wish

TEXTS = (
    "The quick brown fox",
    "The quick brown foxes jump.",
    "  two blanks, then\nlines\n\n\tand a tab",
    "Fünf große Äpfel 🍏🍏",
    "天地玄黃,宇宙洪荒",
    '{"name": "<|im_end|>", "n": 1234567}',
    "ﷺ \u00a0 é",
)
NUM_WALKS = 6


@pytest.fixture(scope="module", params=["smollm2-135m", pytest.param("gemma3-270m", marks=pytest.mark.slow)])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    try:
        folder: Path = modelstore.resolve(request.param)
    except UnknownModel:
        folder = modelstore.fetch(modelstore.ALIASES[request.param])
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer) -> GrammarVocabulary:
    return GrammarVocabulary(tokenizer)


def test_masks_of_choices(tokenizer: Tokenizer, vocabulary: GrammarVocabulary) -> None:
    """Along random spellings of the texts; what is shown of them is one of the texts."""
    tokens = [
        b"" if token_id in tokenizer.special_ids else token
        for token_id, token in enumerate(tokenizer.token_bytes())
    ]
    ends = tokenizer.eos_token_ids
    compiled = compile_structure(Structure.choices(TEXTS), vocabulary)
    shown = set()
    for seed in range(NUM_WALKS):
        source = random.Random(seed)
        matcher = compiled.matcher(ends)
        oracle = ListMatcher([text.encode() for text in TEXTS], tokens, ends)
        taken: list[int] = []
        while not matcher.is_complete:
            allowed = oracle.allowed
            assert ids_of(matcher.mask()) == ids_of(oracle.mask()), oracle.text
            token_id = source.choice(allowed)
            oracle.take(token_id)
            matcher.take(token_id)
            taken.append(token_id)
        assert oracle.is_complete
        stream = tokenizer.stream()
        shown.add(stream.step(taken) + stream.flush())
    assert shown <= set(TEXTS)
    assert len(shown) > 1


@pytest.mark.parametrize("wish", WISHES, ids=str)
def test_random_spellings(wish: Wish, tokenizer: Tokenizer, vocabulary: GrammarVocabulary) -> None:
    """What is shown of them satisfies the structure, by other validators."""
    compiled = compile_structure(wish.structure, vocabulary)
    ends = frozenset(tokenizer.eos_token_ids)
    for seed in range(NUM_WALKS):
        source = random.Random(seed)
        matcher = compiled.matcher(tuple(ends))
        taken: list[int] = []
        while not matcher.is_complete:
            allowed = ids_of(matcher.mask())
            token_id = next(iter(ends)) if ends.issubset(allowed) else source.choice(allowed)
            if token_id in ends:
                break
            matcher.take(token_id)
            taken.append(token_id)
            assert len(taken) < wish.max_tokens
        stream = tokenizer.stream()
        text = stream.step(taken) + stream.flush()
        assert wish.is_right(text), text
