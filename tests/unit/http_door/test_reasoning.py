"""What a model writes to itself, told apart from its answer."""

from __future__ import annotations

from random import Random

import pytest

from http_door.reasoning.think import REASONING, ThoughtMarks, reasoning_parser
from http_door.tools.formats import FORMATS, tool_parser
from http_door.tools.port import Chained, OutputParser, PlainText
from tests.unit.http_door.taking_apart import Apart, apart, parts_of, put_together

CASES = [
    ("both", False, "<think>\nHm.\nYes.\n</think>\n\n  Four.\n", "Hm.\nYes.", "  Four.\n"),
    ("blanks before", False, "\n\n<think>Hm.</think>Four.", "Hm.", "Four."),
    ("begun in the prompt", True, "Hm.\n</think>\nFour.", "Hm.", "Four."),
    ("none was asked for", False, "Four.\n", "", "Four.\n"),
    ("only blanks", False, " \n", "", " \n"),
    ("an empty one", False, "<think>\n\n</think>\n\nFour.", "", "Four."),
    ("cut off", False, "<think>\nHm.\n\n", "Hm.\n\n", ""),
    ("about marks", False, "Write <think> and </think>.", "", "Write <think> and </think>."),
    ("about marks, later", False, "<think>a<think>b</think>c</think>", "a<think>b", "c</think>"),
]
CUT_OFF = [
    ("in the last mark", True, "Hm.\n</thi", "Hm.\n</thi", ""),
    ("in the first mark", False, "<thi", "", "<thi"),
]


@pytest.mark.parametrize("name", sorted(REASONING))
@pytest.mark.parametrize(("about", "is_open", "text", "reasoning", "content"), CASES)
def test_a_text_is_taken_apart_alike_wherever_it_is_cut(
    name: str, about: str, is_open: bool, text: str, reasoning: str, content: str
) -> None:
    marks = REASONING[name]

    def marked(text: str) -> str:
        return text.replace("<think>", marks.begin).replace("</think>", marks.end)

    check(marks, marked(text), is_open, Apart(marked(content), marked(reasoning), ()))


@pytest.mark.parametrize(("about", "is_open", "text", "reasoning", "content"), CUT_OFF)
def test_a_text_that_was_cut_off(about: str, is_open: bool, text: str, reasoning: str, content: str) -> None:
    check(REASONING["think"], text, is_open, Apart(content, reasoning, ()))


def check(marks: ThoughtMarks, text: str, is_open: bool, want: Apart) -> None:
    """Whole, and in each two parts."""
    for cut in range(len(text) + 1):
        parser = reasoning_parser(marks, is_open=is_open)
        assert put_together(parts_of(parser, [text[:cut], text[cut:]])) == want, cut


def test_reasoning_is_said_as_it_comes() -> None:
    parser = reasoning_parser(REASONING["think"], is_open=False)
    assert parser.feed("<think>Since 2") != []
    assert parser.feed(" and 2") != []


@pytest.mark.parametrize(
    ("prompt_end", "is_open"),
    [
        ("<|im_start|>assistant\n", False),
        ("<|Assistant|><think>\n", True),
        ("assistant\n<think>\n\n</think>\n\n", False),
        ("assistant\n<think>\nOkay, so", True),
    ],
)
def test_whether_a_prompt_ends_inside(prompt_end: str, is_open: bool) -> None:
    assert REASONING["think"].are_open_in(prompt_end) is is_open


def test_a_call_in_the_reasoning_is_none() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    text = f"<think>I could {call}.</think>\n\nSo:\n{call}"

    def make() -> OutputParser:
        return Chained(
            reasoning_parser(REASONING["think"], is_open=False), tool_parser(FORMATS["hermes"], (), Random(1))
        )

    for cut in range(len(text) + 1):
        assert apart(make, [text[:cut], text[cut:]]) == Apart("So:", f"I could {call}.", (("f", "{}"),))


def test_without_tools_and_reasoning_everything_is_content() -> None:
    text = "<think>a</think><tool_call>b"
    assert apart(PlainText, text) == Apart(text, "", ())
