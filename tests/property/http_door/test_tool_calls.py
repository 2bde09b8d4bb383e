"""Whatever a model writes and however it is cut: the same comes out, nothing is lost, arguments are JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from http_door.reasoning.think import REASONING, reasoning_parser
from http_door.tools.formats import FORMATS
from http_door.tools.port import Chained, OutputParser
from tests.unit.http_door.taking_apart import apart, golden, parser, pieces_of

PARTS = sorted(
    {
        *(
            "<tool_call>",
            "</tool_call>",
            "[TOOL_CALLS]",
            "[ARGS]",
            "[CALL_ID]",
            "<|python_tag|>",
            "functools",
        ),
        *(
            "<|python_start|>",
            "<|python_end|>",
            "<|tool_call|>",
            "<|/tool_call|>",
            "<|tool_call>",
            "<tool_call|>",
        ),
        *(
            "<start_function_call>",
            "<end_function_call>",
            "<escape>",
            '<|"|>',
            "call:",
            "<think>",
            "</think>",
        ),
        *(
            '{"name": "f", ',
            '"arguments": ',
            '"parameters": ',
            '{"a": 1}',
            "}",
            "{",
            "[",
            "]",
            "(",
            ")",
            '"',
            "'",
        ),
        *(
            "f",
            "g",
            "f(a=1)",
            "f{",
            ",",
            ";",
            ":",
            "=",
            " ",
            "\n",
            "\\",
            "\\u00",
            "ü",
            "\ud800",
            "-1e9",
            "NaN",
            "None",
        ),
        *(case["text"] for _, case in golden() if len(case["text"]) < 100),
    }
)
TEXTS = st.lists(st.sampled_from(PARTS) | st.text(max_size=4), max_size=12).map("".join)
CUTS = st.lists(st.integers(0, 200), max_size=8)
SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(-1e9, 1e9) | st.text(max_size=8)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text("abc_", min_size=1, max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.text("abc_", min_size=1, max_size=3), VALUES, max_size=3)


@pytest.mark.parametrize("name", sorted(FORMATS))
@given(text=TEXTS, cuts=CUTS)
def test_any_text_wherever_it_is_cut(name: str, text: str, cuts: list[int]) -> None:
    def make() -> OutputParser:
        return Chained(reasoning_parser(REASONING["think"], is_open=False), parser(name))

    whole = apart(make, [text])
    assert apart(make, pieces_of(text, cuts)) == whole
    for called, told in whole.calls:
        assert called
        assert isinstance(json.loads(told), dict)
        told.encode()


@pytest.mark.parametrize("name", sorted(FORMATS))
@given(text=TEXTS, cuts=CUTS)
def test_of_a_text_without_calls_nothing_is_lost(name: str, text: str, cuts: list[int]) -> None:
    found = apart(lambda: parser(name), pieces_of(text, cuts))
    if found.calls:
        assert len(found.content) < len(text)
        left = iter(text)
        assert all(character in left for character in found.content), "in the text's order"
    else:
        assert found.content == text


def written(name: str, arguments: dict[str, Any]) -> str:
    """As a model of this family writes a call of `f`."""
    text = json.dumps(arguments, ensure_ascii=False)
    match name:
        case "hermes":
            return f'<tool_call>\n{{"name": "f", "arguments": {text}}}\n</tool_call>'
        case "llama3_json":
            return f'{{"name": "f", "parameters": {text}}}'
        case "mistral":
            return f'[TOOL_CALLS][{{"name": "f", "arguments": {text}}}]'
        case "phi4":
            return f'<|tool_call|>[{{"name": "f", "arguments": {text}}}]<|/tool_call|>'
        case "gemma":
            return f"<|tool_call>call:f{_gemma(arguments)}<tool_call|>"
        case _:
            return f"[f({', '.join(f'{key}={value!r}' for key, value in arguments.items())})]"


def _gemma(value: Any) -> str:
    match value:
        case dict():
            return f"{{{','.join(f'{key}:{_gemma(each)}' for key, each in value.items())}}}"
        case list():
            return f"[{','.join(map(_gemma, value))}]"
        case str():
            return f'<|"|>{value}<|"|>'
        case _:
            return json.dumps(value)


@pytest.mark.parametrize("name", sorted(FORMATS))
@given(arguments=ARGUMENTS, cuts=CUTS)
def test_a_call_is_read_as_it_was_meant(name: str, arguments: dict[str, Any], cuts: list[int]) -> None:
    found = apart(lambda: parser(name), pieces_of(written(name, arguments), cuts))
    assert found.content == ""
    assert [(called, json.loads(told)) for called, told in found.calls] == [("f", arguments)]


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral", "phi4"])
@given(arguments=ARGUMENTS)
def test_valid_arguments_are_passed_on_to_the_letter(name: str, arguments: dict[str, Any]) -> None:
    ((_, told),) = apart(lambda: parser(name), [written(name, arguments)]).calls
    assert told == json.dumps(arguments, ensure_ascii=False)
