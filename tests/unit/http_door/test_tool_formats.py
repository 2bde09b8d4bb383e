"""Texts with calls, and texts that look so: what they are, wherever they are cut."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

from http_door.tools.formats import FORMATS
from http_door.tools.reader import MAX_HELD
from tests.unit.http_door.taking_apart import Apart, apart, golden, parser, parts_of

CASES = golden()


def expected(case: dict[str, Any]) -> Apart:
    return Apart(case["content"], "", tuple((name, told) for name, told in case["calls"]))


@pytest.mark.parametrize(("name", "case"), CASES, ids=[f"{name}: {case['about']}" for name, case in CASES])
def test_a_text_is_taken_apart_alike_wherever_it_is_cut(name: str, case: dict[str, Any]) -> None:
    text = case["text"]
    want = expected(case)
    assert apart(lambda: parser(name), [text]) == want
    assert apart(lambda: parser(name), text) == want, "letter by letter"
    for cut in range(len(text)):
        assert apart(lambda: parser(name), [text[:cut], text[cut:]]) == want, cut


def test_every_format_has_golden_texts() -> None:
    assert {name for name, _ in CASES} == set(FORMATS)


@pytest.mark.parametrize(("name", "case"), CASES, ids=[f"{name}: {case['about']}" for name, case in CASES])
def test_arguments_are_an_object_in_json(name: str, case: dict[str, Any]) -> None:
    for _, told in case["calls"]:
        assert isinstance(json.loads(told), dict)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_text_is_said_as_it_comes(name: str) -> None:
    held = parser(name)
    assert "".join(getattr(part, "text", "") for part in held.feed("The answer is 4, since")) == (
        "The answer is 4, since"
    )


def test_an_answer_in_json_is_not_held_back() -> None:
    answering = parser("llama3_json")
    assert answering.feed('{"answer": ') != []


@pytest.mark.parametrize(
    ("name", "begin", "filling"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "', 'x\\"'),
        ("hermes", "<tool_call>", "[" * 64),
        ("hermes", "", '<tool_call>{"name": '),
        ("llama3_json", "", '{"name": "'),
        ("pythonic", "[f(a='", "x("),
        ("pythonic", "", "<|python_start|>[f("),
        ("mistral", "[TOOL_CALLS]", "name"),
        ("mistral", "", "[TOOL_CALLS]"),
        ("phi4", "", "<|tool_call|>[{"),
        ("gemma", '<|tool_call>call:f{a:<|"|>', "<|"),
        ("gemma", "<start_function_call>call:f", "{a:"),
        ("hermes", "", " \n"),
    ],
)
def test_nothing_of_an_endless_text_is_lost_and_little_is_held(name: str, begin: str, filling: str) -> None:
    text = begin + filling * (5 * MAX_HELD // 4 // len(filling))
    endless = parser(name)
    told: list[str] = []
    num_held = 0
    for at in range(0, len(text), 4096):
        said = [getattr(part, "text", "") for part in endless.feed(text[at : at + 4096])]
        told += said
        num_held += len(text[at : at + 4096]) - sum(map(len, said))
        assert num_held <= MAX_HELD + 2 * 4096
    told += [getattr(part, "text", "") for part in endless.finish()]
    assert "".join(told) == text


@pytest.mark.parametrize("number", ["{}a", "1.{}a", ".{}a", "1e{}a", "-{}.x"])
def test_a_number_that_is_none_takes_time_by_its_length(number: str) -> None:
    # The square of so many digits is an hour: this ends, or it runs into pytest's limit.
    text = f"[f(x={number.format('1' * (MAX_HELD - 64))})]"
    assert apart(lambda: parser("pythonic"), [text]) == Apart(text, "", ())


@pytest.mark.parametrize("size", [1, 7])
def test_ids_are_of_the_kind_that_the_templates_take(size: int) -> None:
    call = '{"name": "f", "arguments": {}}'
    for name, text, length in (
        ("hermes", f"<tool_call>{call}</tool_call>", len("call_") + 24),
        ("mistral", f"[TOOL_CALLS][{call}]", 9),
    ):
        begun = parts_of(parser(name), [text[at : at + size] for at in range(0, len(text), size)])[0]
        assert len(begun.call_id) == length and begun.call_id.removeprefix("call_").isalnum()  # type: ignore[union-attr]


def test_ids_differ_from_parser_to_parser_of_one_random() -> None:
    from http_door.tools.formats import tool_parser

    rng = Random(3)
    text = '<tool_call>{"name": "f"}</tool_call>'
    ids = {parts_of(tool_parser(FORMATS["hermes"], (), rng), [text])[0].call_id for _ in range(64)}  # type: ignore[union-attr]
    assert len(ids) == 64
