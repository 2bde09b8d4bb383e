"""Whether a structure has a text: each byte allowed by the mask before it, the end by the last one."""

from __future__ import annotations

from pdserve.grammar.compiler import compile_structure
from pdserve.grammar.vocabulary import GrammarVocabulary
from pdserve.structure import Structure
from pdserve.token_mask import allows
from pdserve.tokenizer import Tokenizer

_BYTES = GrammarVocabulary(Tokenizer.fake())
_END = 256


def accepts(grammar: str, text: str) -> bool:
    """For a grammar, in Lark or GBNF."""
    return structure_accepts(Structure.grammar(grammar), text)


def structure_accepts(structure: Structure, text: str) -> bool:
    """For any structure."""
    matcher = compile_structure(structure, _BYTES).matcher((_END,))
    for byte in text.encode():
        if matcher.is_complete or not allows(matcher.mask(), byte):
            return False
        matcher.take(byte)
    return matcher.is_complete or allows(matcher.mask(), _END)
