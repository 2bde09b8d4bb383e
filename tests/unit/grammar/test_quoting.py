r"""What stands in a structure reaches the library whole, whatever slashes and backslashes are in it."""

from __future__ import annotations

import pytest

from pdserve.grammar.quoting import offset_in_regex, quoted_regex
from pdserve.structure import Structure
from tests.support.acceptance import structure_accepts

REGEXES = [
    (r"[A-Z]:\\/[a-z]+", "D:\\/tmp", "D:\\/"),
    (r"[^\\/]{1,40}", "notes.txt", "a/b"),
    (r"[\\/]", "/", "a"),
    (r"[\\/]", "\\", ""),
    (r"[a-z]+\\/#[0-9]+", "ab\\/#7", "ab\\"),
    (r"[a-z]+\\/ ?# ?[0-9]+", "ab\\/ # 7", "ab\\/"),
    (r"\/\\", "/\\", "/"),
    (r"\\\/", "\\/", "\\"),
    (r"//i", "//i", "//I"),
    (r"a\\", "a\\", "a"),
    ("x\n/\\/\\\\", "x\n//\\", "x\n//"),
    (r"\\n", "\\n", "\n"),
]


@pytest.mark.parametrize(("regex", "good", "bad"), REGEXES)
def test_a_regex_keeps_its_language(regex: str, good: str, bad: str) -> None:
    assert structure_accepts(Structure.regex(regex), good)
    assert not structure_accepts(Structure.regex(regex), bad)


def test_an_offset_is_that_of_the_users_text() -> None:
    regex = "a/\\/\\\\/\\d("
    quoted = quoted_regex(regex)[1:-1]
    assert quoted == r"a\x2F\x2F\x5C\x2F\d("
    assert [offset_in_regex(regex, quoted.index(part)) for part in ("a", r"\x5C", r"\d", "d(", "(")] == [
        0,
        4,
        7,
        8,
        9,
    ]


@pytest.mark.parametrize(
    "text", ["\x00\x01\b\f\x7f\x85\u2028é😀\\/\"'\n\t", "\\u0041", "\\", "/", '"', "a b"]
)
def test_a_choice_is_taken_as_it_is(text: str) -> None:
    structure = Structure.choices([text, "zz"])
    assert structure_accepts(structure, text)
    assert structure_accepts(structure, "zz")
    assert not structure_accepts(structure, "A")
