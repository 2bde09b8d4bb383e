"""Drawn GBNF grammars have the texts that a reader of single characters finds in them, and no others."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.grammar.compiler import compile_structure
from pdserve.grammar.vocabulary import GrammarVocabulary
from pdserve.structure import Structure
from pdserve.token_mask import allows
from tests.support.byte_tokens import byte_vocabulary

LETTERS = "ab"
TEXTS = ["".join(letters) for length in range(5) for letters in itertools.product(LETTERS, repeat=length)]
END = 2
VOCABULARY: GrammarVocabulary = byte_vocabulary([b"a", b"b"])


@dataclass(frozen=True)
class Part:
    """kind: text, class, name, then, or, repeat; times: at least and at most."""

    kind: str
    text: str = ""
    parts: tuple[Part, ...] = ()
    times: tuple[int, int] = (1, 1)

    def gbnf(self) -> str:
        match self.kind:
            case "text":
                return '"' + "".join(f"\\u{ord(char):04x}" for char in self.text) + '"'
            case "class":
                return f"[{self.text}]"
            case "name":
                return self.text
            case "then":
                return f"({' '.join(part.gbnf() for part in self.parts)})"
            case "or":
                return f"({' | '.join(part.gbnf() for part in self.parts)})"
        return f"{self.parts[0].gbnf()}{{{self.times[0]},{self.times[1]}}}"


Rules = dict[str, Part]


def ends(part: Part, rules: Rules, text: str, begin: int, depth: int) -> set[int]:
    """Where it may end in the text. depth: rules inside rules that are still looked into."""
    match part.kind:
        case "text":
            return {begin + len(part.text)} if text.startswith(part.text, begin) else set()
        case "class":
            return {begin + 1} if begin < len(text) and text[begin] in part.text else set()
        case "name":
            return ends(rules[part.text], rules, text, begin, depth - 1) if depth else set()
        case "or":
            return set().union(*(ends(each, rules, text, begin, depth) for each in part.parts))
    found = {begin}
    reached = set(found) if part.times[0] == 0 and part.kind == "repeat" else set()
    steps = part.parts if part.kind == "then" else part.parts * part.times[1]
    for number, each in enumerate(steps, 1):
        found = set().union(*(ends(each, rules, text, place, depth) for place in found))
        if part.kind == "repeat" and number >= part.times[0]:
            reached |= found
    return found if part.kind == "then" else reached


def parts(names: list[str]) -> st.SearchStrategy[Part]:
    leaves = [
        st.builds(lambda text: Part("text", text), st.text(LETTERS, min_size=1, max_size=2)),
        st.builds(lambda text: Part("class", text), st.sampled_from(["a", "ab", "b"])),
        st.builds(lambda name: Part("name", name), st.sampled_from(names)),
    ]
    return st.recursive(
        st.one_of(leaves),
        lambda inner: st.one_of(
            st.builds(lambda each: Part("then", parts=tuple(each)), st.lists(inner, min_size=1, max_size=3)),
            st.builds(lambda each: Part("or", parts=tuple(each)), st.lists(inner, min_size=1, max_size=3)),
            st.builds(
                lambda each, least, more: Part("repeat", parts=(each,), times=(least, least + more)),
                inner,
                st.integers(0, 1),
                st.integers(1, 2),
            ),
        ),
        max_leaves=5,
    )


@st.composite
def grammars(draw: st.DrawFn) -> Rules:
    """Rules that name later ones only, or, drawn otherwise, any: then behind a letter, so that they end."""
    names = ["root", "x", "y"]
    if draw(st.booleans()):
        later = [["x", "y"], ["y"], []]
        leaf = Part("text", "a")
        return {
            name: draw(parts(later[number])) if later[number] else leaf for number, name in enumerate(names)
        }
    return {
        name: Part(
            "or", parts=(Part("then", parts=(Part("class", "ab"), draw(parts(names)))), Part("text", "b"))
        )
        for name in names
    }


@settings(max_examples=40)
@given(grammars())
def test_has_the_same_texts(rules: Rules) -> None:
    grammar = "\n".join(f"{name} ::= {part.gbnf()}" for name, part in rules.items())
    wanted = {text for text in TEXTS if len(text) in ends(rules["root"], rules, text, 0, 12)}
    compiled = compile_structure(Structure.grammar(grammar), VOCABULARY)  # each drawn grammar has some text
    for text in TEXTS:
        matcher = compiled.matcher((END,))
        taken = 0
        for letter in text:
            token_id = LETTERS.index(letter)
            if matcher.is_complete or not allows(matcher.mask(), token_id):
                break
            matcher.take(token_id)
            taken += 1
        accepted = taken == len(text) and (matcher.is_complete or allows(matcher.mask(), END))
        assert accepted == (text in wanted), (grammar, text)
