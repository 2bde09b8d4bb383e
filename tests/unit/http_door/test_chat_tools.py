"""Chats with tools and reasoning: what is asked of the model, and what its text becomes for the client."""

from __future__ import annotations

import json
from collections.abc import Iterable
from random import Random
from typing import Any

import pytest

from http_door.answer import Json, Occasion
from http_door.chat import ChatAnswer, ChatFields
from http_door.errors import HttpRefusal
from http_door.fields import read_body
from http_door.styles import Styles
from pdserve.request import Chat, Event
from pdserve.sampling import FinishReason
from tests.unit.http_door.generations import SPELLED, events_of

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}},
        },
    }
    for name in ("f", "g")
]
CALL = '<tool_call>\n{"name": "f", "arguments": {"n": 1}}\n</tool_call>'
TWO = (
    'I look.\n<tool_call>{"name": "f", "arguments": {"n": 1}}</tool_call><tool_call>{"name": "g"}</tool_call>'
)
HERMES = Styles("hermes")


def asked(styles: Styles = HERMES, **body: Any) -> ChatAnswer:
    given = {"messages": [{"role": "user", "content": "hi"}], **body}
    fields = read_body(json.dumps(given).encode(), ChatFields, refuses_unknown=True)
    return ChatAnswer(fields, Occasion(request_id="r", created_s=0, random=Random(1), styles=styles))


def whole(answer: ChatAnswer, events: Iterable[Event]) -> Json:
    for event in events:
        assert list(answer.take(0, event, SPELLED)) == []
    (choice,) = answer.whole()["choices"]
    found: Json = choice
    return found


def streamed(answer: ChatAnswer, events: Iterable[Event]) -> list[Json]:
    return [part["choices"][0] for event in events for part in answer.take(0, event, SPELLED)]


def put_together(parts: list[Json]) -> tuple[str, str, list[Json]]:
    """As clients do it: text, reasoning and calls."""
    text = reasoning = ""
    calls: list[Json] = []
    for part in parts:
        delta = part["delta"]
        text += delta.get("content") or ""
        reasoning += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(calls) and call["type"] == "function"
                calls.append({"id": call["id"], "type": "function", "function": dict(call["function"])})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return text, reasoning, calls


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_a_stream_says_what_the_whole_answer_says(size: int) -> None:
    choice = whole(asked(tools=TOOLS), events_of(TWO, size=size))
    message = choice["message"]
    assert message["content"] == "I look."
    assert [each["function"] for each in message["tool_calls"]] == [
        {"name": "f", "arguments": '{"n": 1}'},
        {"name": "g", "arguments": "{}"},
    ]
    assert choice["finish_reason"] == "tool_calls"
    streaming = asked(tools=TOOLS, stream=True)
    parts = streamed(streaming, events_of(TWO, size=size))
    assert put_together(parts) == ("I look.", "", message["tool_calls"])
    assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["tool_calls"]
    assert parts[0]["delta"]["role"] == "assistant"
    kept = streaming.whole()["choices"][0]["message"]
    assert kept == {"role": "assistant", "content": "", "refusal": None}, "what was sent isn't kept"


def test_a_message_of_calls_alone_has_no_text() -> None:
    assert whole(asked(tools=TOOLS), events_of(CALL))["message"]["content"] is None


def test_one_call_where_no_more_are_wanted() -> None:
    choice = whole(asked(tools=TOOLS, parallel_tool_calls=False), events_of(TWO))
    assert [each["function"]["name"] for each in choice["message"]["tool_calls"]] == ["f"]


def test_a_text_that_was_cut_off_is_no_call() -> None:
    choice = whole(asked(tools=TOOLS), events_of(CALL[:-20], FinishReason.LENGTH))
    assert choice["message"] == {"role": "assistant", "content": CALL[:-20], "refusal": None}
    assert choice["finish_reason"] == "length"


def test_calls_before_the_text_was_cut_off_are_told_as_cut_off() -> None:
    choice = whole(asked(tools=TOOLS), events_of(CALL, FinishReason.LENGTH))
    assert (choice["finish_reason"], len(choice["message"]["tool_calls"])) == ("length", 1)


def test_without_tools_marks_are_text() -> None:
    all_given: list[dict[str, Any]] = [
        {},
        {"tools": []},
        {"tools": TOOLS, "tool_choice": "none"},
        {"tool_choice": "none"},
    ]
    for given in all_given:
        answer = asked(**given)
        assert isinstance(answer.requests[0].input, Chat)
        assert answer.requests[0].input.tools_json == ""
        assert whole(answer, events_of(CALL))["message"]["content"] == CALL


@pytest.mark.parametrize(
    ("choice", "names", "is_one"),
    [("required", "fg", False), ({"type": "function", "function": {"name": "g"}}, "g", True)],
)
@pytest.mark.parametrize("style", ["hermes", "llama3_json", ""])
def test_demanded_calls_are_a_structure_of_the_text(
    choice: Any, names: str, is_one: bool, style: str
) -> None:
    (request,) = asked(Styles(style), tools=TOOLS, tool_choice=choice).requests
    assert request.sampling.structure is not None
    grammar = request.sampling.structure.text
    assert [name for name in "fg" if f"name\\x{{22}}\\x{{3A}}\\x{{20}}\\x{{22}}{name}" in grammar] == list(
        names
    )
    assert ("{0,15}" in grammar) is not is_one
    assert not request.sampling.keep_special_tokens


def test_calls_between_special_tokens_need_a_text_that_shows_them() -> None:
    for style, wanted in (("hermes", False), ("mistral", True)):
        (request,) = asked(Styles(style), tools=TOOLS).requests
        assert request.sampling.keep_special_tokens is wanted
    (request,) = asked(skip_special_tokens=False).requests
    assert request.sampling.keep_special_tokens


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].type"),
        ({"tools": [TOOLS[0], {"type": "function", "function": {"name": 3}}]}, "tools[1]"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0]"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1]"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "h"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
            "tool_choice",
        ),
    ],
)
def test_what_can_not_be_names_its_field(given: dict[str, Any], param: str) -> None:
    with pytest.raises(HttpRefusal) as refused:
        asked(**given)
    assert (refused.value.status, refused.value.param) == (400, param)


def test_a_model_whose_calls_nobody_knows_is_said() -> None:
    with pytest.raises(HttpRefusal, match="--tool-parser"):
        asked(Styles(), tools=TOOLS)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_open", [False, True])
def test_reasoning_is_told_apart(stream: bool, is_open: bool) -> None:
    text = "Hm.\n</think>\n\nFour."
    prompt = (1, 2, 3) if is_open else (1,)
    events = events_of(text if is_open else f"<think>\n{text}", prompt=prompt)
    answer = asked(Styles("", "think"), stream=stream)
    first = next(iter(events_of("", prompt=prompt)))
    assert set(answer.ids_to_spell(first)) == set(prompt)
    if stream:
        assert put_together(streamed(answer, events)) == ("Four.", "Hm.", [])
    else:
        message = whole(answer, events)["message"]
        assert (message["content"], message["reasoning_content"]) == ("Four.", "Hm.")


def test_a_text_with_a_structure_is_no_reasoning() -> None:
    answer = asked(Styles("", "think"), response_format={"type": "json_object"})
    assert whole(answer, events_of("{}", prompt=(1, 2, 3)))["message"]["content"] == "{}"
