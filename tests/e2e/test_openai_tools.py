"""The unmodified `openai` client: tools that the model must call, and responses, by the packaged model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam
from openai.types.responses import FunctionToolParam, ResponseInputParam

from tests.support.processes import LocalCluster, run_cli

pytestmark = pytest.mark.slow
MODEL = "smollm2-135m"
PARAMETERS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 16},
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
        },
        "required": ["city", "unit"],
    },
    "add": {
        "type": "object",
        "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"type": "integer", "maximum": 99}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
}
TOOLS: list[ChatCompletionToolParam] = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in PARAMETERS.items()
]
FLAT: list[FunctionToolParam] = [
    {"type": "function", "name": name, "parameters": schema, "strict": True}
    for name, schema in PARAMETERS.items()
]
ASKED: list[ChatCompletionMessageParam] = [
    {"role": "user", "content": "What is the weather in Paris, in celsius?"}
]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    assert run_cli("fetch", MODEL, limit_s=300).returncode == 0
    with (
        LocalCluster(tmp_path_factory.mktemp("tools"), "--model", MODEL) as cluster,
        openai.OpenAI(base_url=f"{cluster.http}/v1", api_key="none", max_retries=0) as made,
    ):
        yield made


def calls_of(completion: Any) -> list[Any]:
    """Of its one choice."""
    (choice,) = completion.choices
    return choice.message.tool_calls or []


def check_call(name: str, arguments: str) -> None:
    jsonschema.validate(json.loads(arguments), PARAMETERS[name])


@pytest.mark.parametrize("seed", range(4))
def test_a_call_that_must_be_made_is_made(client: openai.OpenAI, seed: int) -> None:
    completion = client.chat.completions.create(
        model=MODEL, messages=ASKED, tools=TOOLS, tool_choice="required", parallel_tool_calls=False,
        max_tokens=256, seed=seed, temperature=1.0,
    )  # fmt: skip
    (choice,) = completion.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = calls_of(completion)
    check_call(call.function.name, call.function.arguments)


def test_a_stream_says_the_same_call(client: openai.OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "add"}}
    whole = client.chat.completions.create(
        model=MODEL, messages=ASKED, tools=TOOLS, tool_choice=named, max_tokens=256, seed=3
    )
    (call,) = calls_of(whole)
    check_call("add", call.function.arguments)
    with client.chat.completions.stream(
        model=MODEL, messages=ASKED, tools=TOOLS, tool_choice=named, max_tokens=256, seed=3
    ) as stream:
        pieces = [
            event.arguments_delta for event in stream if event.type == "tool_calls.function.arguments.delta"
        ]
        final = stream.get_final_completion()
    (streamed,) = calls_of(final)
    assert (streamed.function.name, streamed.function.arguments) == ("add", call.function.arguments)
    assert "".join(pieces) == call.function.arguments
    assert len(pieces) > 3, "arguments come as they are written"
    assert final.choices[0].finish_reason == "tool_calls"


def test_what_was_called_goes_back_as_it_came(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(
        model=MODEL,
        messages=ASKED,
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=256,
    )
    (call,) = calls_of(first)
    said: Any = first.choices[0].message.model_dump(exclude_none=True)
    answered: ChatCompletionMessageParam = {"role": "tool", "tool_call_id": call.id, "content": "18 degrees"}
    second = client.chat.completions.create(
        model=MODEL, messages=[*ASKED, said, answered], tools=TOOLS, tool_choice="none", max_tokens=8
    )
    assert second.choices[0].message.content
    assert second.choices[0].message.tool_calls is None


def test_tools_that_the_model_can_not_call_by_itself(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="--tool-parser") as refused:
        client.chat.completions.create(model=MODEL, messages=ASKED, tools=TOOLS)
    assert refused.value.param == "tools"


def test_a_response(client: openai.OpenAI) -> None:
    whole = client.responses.create(
        model=MODEL, input="Say hello.", instructions="Be brief.", max_output_tokens=12, temperature=0
    )
    assert (whole.status, whole.object) == ("incomplete", "response")
    assert whole.incomplete_details and whole.incomplete_details.reason == "max_output_tokens"
    assert whole.output_text
    assert whole.usage and whole.usage.output_tokens == 12
    with client.responses.stream(
        model=MODEL, input="Say hello.", instructions="Be brief.", max_output_tokens=12, temperature=0
    ) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.incomplete",
    ]  # fmt: skip
    told = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(told) == whole.output_text


def test_a_response_that_must_call(client: openai.OpenAI) -> None:
    first = client.responses.create(
        model=MODEL, input="Add 2 and 3.", tools=FLAT, tool_choice={"type": "function", "name": "add"}
    )
    (item,) = first.output
    assert first.status == "completed" and item.type == "function_call"
    check_call(item.name, item.arguments)
    conversation: ResponseInputParam = [
        {"role": "user", "content": "Add 2 and 3."},
        {"type": "function_call", "call_id": item.call_id, "name": item.name, "arguments": item.arguments},
        {"type": "function_call_output", "call_id": item.call_id, "output": "5"},
    ]
    second = client.responses.create(
        model=MODEL, input=conversation, tools=FLAT, tool_choice="none", max_output_tokens=8
    )
    assert second.output_text


def test_a_response_with_a_format(client: openai.OpenAI) -> None:
    schema = {
        "type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"],
        "additionalProperties": False,
    }  # fmt: skip
    made = client.responses.create(
        model=MODEL,
        input="A number, please.",
        text={"format": {"type": "json_schema", "name": "number", "schema": schema, "strict": True}},
        max_output_tokens=128,
    )
    jsonschema.validate(json.loads(made.output_text), schema)


def test_a_response_that_would_have_to_be_kept(client: openai.OpenAI) -> None:
    for given in ({"store": True}, {"previous_response_id": "resp_1"}, {"background": True}):
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(model=MODEL, input="hi", **given)
        assert refused.value.param == next(iter(given))
