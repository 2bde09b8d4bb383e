"""/v1/responses: input in, items out, and events of a stream in their order."""

from __future__ import annotations

import json
from collections.abc import Iterable
from random import Random
from typing import Any

import pytest

from http_door.answer import Json, Occasion
from http_door.errors import HttpRefusal
from http_door.fields import read_body
from http_door.responses import ResponseAnswer, ResponseFields
from http_door.styles import Styles
from pdserve.request import Chat, Event
from pdserve.sampling import FinishReason
from tests.unit.http_door.generations import SPELLED, events_of

STYLES = Styles("hermes", "think")
TOOLS = [
    {
        "type": "function",
        "name": "f",
        "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}},
    }
]
CALL = '<tool_call>{"name": "f", "arguments": {"n": 1}}</tool_call>'
TEXT = f"<think>\nHm.\n</think>\n\nI look.\n{CALL}{CALL}\nDone."


def asked(**body: Any) -> ResponseAnswer:
    fields = read_body(json.dumps({"input": "hi", **body}).encode(), ResponseFields, refuses_unknown=True)
    return ResponseAnswer(fields, Occasion(request_id="r", created_s=5, random=Random(1), styles=STYLES))


def run(answer: ResponseAnswer, events: Iterable[Event]) -> list[Json]:
    """All events of the stream; none where it doesn't stream."""
    told = [part for event in events for part in answer.take(0, event, SPELLED)]
    return [*told, *answer.end()]


def rebuilt(events: list[Json]) -> list[Json]:
    """The items, by the events alone: each opened once, told piece by piece, and closed."""
    items: list[Json] = []
    texts: list[str] = []
    for event in events:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert event["output_index"] == len(items)
            assert event["item"]["status"] == "in_progress"
            items.append(event["item"])
            texts.append("")
        elif kind.endswith(".delta"):
            assert (event["output_index"], event["item_id"]) == (len(items) - 1, items[-1]["id"])
            texts[-1] += event["delta"]
        elif kind == "response.output_item.done":
            assert event["output_index"] == len(items) - 1
            done = event["item"]
            assert done["id"] == items[-1]["id"]
            assert texts[-1] == (done["arguments"] if "arguments" in done else done["content"][0]["text"])
            items[-1] = done
        elif kind.endswith("_text.done"):
            assert event["text"] == texts[-1]
        elif kind == "response.function_call_arguments.done":
            assert event["arguments"] == texts[-1]
    return items


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_a_stream_tells_the_items_of_the_whole_response(size: int) -> None:
    answer = asked(tools=TOOLS)
    assert [event["type"] for event in run(answer, events_of(TEXT, size=size))] == ["response.completed"]
    whole = answer.whole()
    assert [item["type"] for item in whole["output"]] == [
        "reasoning", "message", "function_call", "function_call", "message",
    ]  # fmt: skip
    assert [item["content"][0]["text"] for item in whole["output"] if "content" in item] == [
        "Hm.",
        "I look.",
        "\nDone.",
    ]
    assert [item["arguments"] for item in whole["output"] if "arguments" in item] == ['{"n": 1}'] * 2
    assert len({item["id"] for item in whole["output"]}) == 5
    events = run(asked(tools=TOOLS, stream=True), events_of(TEXT, size=size))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    items, last = rebuilt(events), events[-1]
    assert last["type"] == "response.completed"
    for item, want in zip(items, whole["output"], strict=True):
        assert item | {"call_id": 0} == want | {"call_id": 0}
    assert last["response"]["output"] == items
    assert last["response"]["usage"]["input_tokens"] == 1


def test_what_was_cut_off_says_so() -> None:
    answer = asked()
    run(answer, events_of("Some text", FinishReason.LENGTH))
    whole = answer.whole()
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert whole["output"][0]["status"] == "incomplete"


def test_an_empty_text_is_a_response_without_items() -> None:
    answer = asked(stream=True)
    assert [event["type"] for event in run(answer, events_of(""))] == [
        "response.created", "response.in_progress", "response.completed",
    ]  # fmt: skip
    assert answer.whole()["output"] == []


def test_a_conversation_comes_back_as_items() -> None:
    given = [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": '{"n": 1}'},
        {"type": "function_call", "call_id": "b", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "one"},
        {"type": "function_call_output", "call_id": "b", "output": "two"},
    ]
    chat = asked(input=given, instructions="Be brief.", tools=TOOLS).requests[0].input
    assert isinstance(chat, Chat)
    seen = [message.as_template_sees_it() for message in chat.messages]
    assert [(each["role"], each["content"]) for each in seen] == [
        ("system", "Be brief."), ("user", "hi"), ("assistant", "I look."), ("tool", "one"), ("tool", "two"),
    ]  # fmt: skip
    assert seen[2]["reasoning_content"] == "Hm."
    assert (
        [call["id"] for call in seen[2]["tool_calls"]]
        == ["a", "b"]
        == [each["tool_call_id"] for each in seen[3:]]
    )
    assert json.loads(chat.tools_json)[0]["function"]["name"] == "f"


def test_a_format_is_a_structure_of_the_text() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    answer = asked(text={"format": {"type": "json_schema", "name": "x", "schema": schema}})
    structure = answer.requests[0].sampling.structure
    assert structure is not None and json.loads(structure.text) == schema
    assert answer.whole()["text"]["format"]["name"] == "x"


def test_a_demanded_call_is_a_structure_of_the_text() -> None:
    answer = asked(tools=TOOLS, tool_choice={"type": "function", "name": "f"})
    assert answer.requests[0].sampling.structure is not None


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"truncation": "auto"}, "truncation"),
        ({"n": 2}, "n"),
        ({"return_token_ids": True}, "return_token_ids"),
        ({"stream": True, "stream_options": {"include_usage": True}}, "stream_options.include_usage"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "judge", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        (
            {"tools": TOOLS, "tool_choice": "required", "text": {"format": {"type": "json_object"}}},
            "tool_choice",
        ),
    ],
)
def test_what_can_not_be_names_its_field(given: dict[str, Any], param: str) -> None:
    with pytest.raises(HttpRefusal) as refused:
        asked(**given)
    assert (refused.value.status, refused.value.param) == (400, param)


def test_what_says_what_is_true_anyway_is_taken() -> None:
    asked(previous_response_id=None, store=False, truncation="disabled", metadata={"a": "b"}, include=[])
    asked(stream=True, stream_options={"include_obfuscation": False})
