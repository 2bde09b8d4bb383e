"""GBNF means what llama.cpp says it means: its escapes, classes and repetitions, character by character."""

from __future__ import annotations

import re

import pytest

from pdserve.errors import InvalidRequest
from pdserve.grammar.lark import is_gbnf
from tests.support.acceptance import accepts

CASES: list[tuple[str, list[str], list[str]]] = [
    (r'root ::= "\u00e9ab"', ["éab"], ["\ue9ab", "éa"]),
    (r'root ::= "caf\u00e9"', ["café"], []),
    (r"root ::= [\u0041bc]", ["A", "b", "c"], ["B"]),
    (r"root ::= [\x20-\U0010FFFF]+", [" ", "é", "\U0010ffff😀"], ["\n", ""]),
    (r'root ::= "say: " [\U0001F600-\U0001F64F]', ["say: 😀"], ["say: a"]),
    (r'root ::= "\"\\\t\r\n\[\]\-/"', ['"\\\t\r\n[]-/'], []),
    (r'root ::= [!"#$%&()*+,-./:;<=>?@[\\\]^_`{|}~]', list("!\"#$%&()*+,-./:;<=>?@[\\]^_`{|}~"), ["'", "a"]),
    (r"root ::= [a\-z]", ["a", "-", "z"], ["b"]),
    (r"root ::= [a-] [-a] [^-]", ["a-b", "-a."], ["b-b", "a--"]),
    (r"root ::= [\x61-\x63&&b~~-]", ["a", "b", "c", "&", "~", "-"], ["d"]),
    ("root ::= [^\\r\\n\x0b\\x85\\u2028]+", ["a\tb"], ["a\nb", "\u2028"]),
    ("root ::= .", ["\n", "é", "\x00"], ["", "ab"]),
    ('root ::= "a"{2,3} "b"{2} "c"{1,} "d"{0} "e"{ 0 , 1 }', ["aabbc", "aaabbcce"], ["abbc", "aabbcd", "aabbcee"]),
    ('root ::= ("ab")* | "ab"* "x"?', ["", "abab", "ababx"], ["abb"]),
    ('root ::= ("a"+)? "b"', ["b", "aab"], ["a"]),
    ('root ::= a-b aB | a_b\na-b ::= "1"\naB ::= "2"\na_b ::= "3"\nstart ::= "4"', ["12", "3"], ["4"]),
    ('root ::= # why\n  "a" |\n\n  # or\n "b" # end', ["a", "b"], ["ab"]),
    ('root ::= "x"\nroot ::= "y"', ["y"], ["x"]),
    ("root ::= | a\na ::= [z]", ["", "z"], ["zz"]),
    ('root ::= x "bc"\nx ::= "ab" | "a"', ["abc", "abbc"], ["ab"]),
    ('root ::= [a-c]* "ab"', ["ab", "abab", "caab"], ["aba"]),
    # With recursion: what a longest lexeme would swallow.
    ('root ::= (sum "=" ws sum "\\n")+\nsum ::= item ("+" item)*\nitem ::= num | "(" sum ")" ws\nnum ::= [0-9]+ ws\n'
     "ws ::= [ \\n]*", ["1=2\n", "1 = 2 \n\n3+(4)=5\n"], ["1=2", "=1\n"]),
    ('root ::= "(" root ")" | w "while"\nw ::= [a-z]*', ["while", "(xwhile)", "(whilewhile)"], ["(while", "whil"]),
    ('root ::= root "+" one | one\none ::= "1"', ["1", "1+1+1"], ["1+"]),
]  # fmt: skip


@pytest.mark.parametrize(("grammar", "good", "bad"), CASES, ids=[f"{n}" for n in range(len(CASES))])
def test_means_what_it_says(grammar: str, good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not accepts(grammar, text)] == []
    assert [text for text in bad if accepts(grammar, text)] == []


REFUSED = [
    ('"a"', "a grammar begins with NAME ::=, line=1, column=1"),
    ('root ::= "a" | y', "there is no rule 'y', line=1, column=16"),
    ('x ::= "a"', "there is no rule 'root'"),
    ('root ::= "a"\nx ::= ("b"', "this parenthesis isn't closed, line=2, column=7"),
    ('root ::= "a")', "this parenthesis closes nothing, line=1, column=13"),
    ("root ::= * ", "nothing before this can be repeated, line=1, column=10"),
    ('root ::= "a" | +', "nothing before this can be repeated, line=1, column=16"),
    ('# é\n\nroot ::= "a" "b\\q"', "unknown escape, line=3, column=16"),
    (r"root ::= [a\d]", "unknown escape, line=1, column=12"),
    (r'root ::= "\u12"', "unknown escape, line=1, column=11"),
    (r'root ::= "\ud800"', "this is no character, line=1, column=11"),
    (r'root ::= "\U00110000"', "this is no character, line=1, column=11"),
    ("root ::= [z-a]", "this range ends before it begins, line=1, column=11"),
    ("root ::= [^]", "this class is empty, line=1, column=10"),
    ('root ::= "a', "this is not GBNF, line=1, column=10"),
    ('root ::= "a"{3,2}', "its upper bound is below its lower one, line=1, column=13"),
    ('root ::= "a"{,3}', "this is not GBNF, line=1, column=13"),
    ('root ::= "a" & "b"', "this is not GBNF, line=1, column=14"),
]


@pytest.mark.parametrize(("grammar", "why"), REFUSED, ids=[f"{n}" for n in range(len(REFUSED))])
def test_is_refused_with_the_place(grammar: str, why: str) -> None:
    if not is_gbnf(grammar):
        grammar += "\nroot ::="
    with pytest.raises(InvalidRequest, match=re.escape(f"grammar can't be used (why={why}")):
        accepts(grammar, "")


def test_lark_may_speak_of_gbnfs_sign() -> None:
    assert accepts('start: NAME "::=" NAME\nNAME: /[a-z]+/', "a::=b")
