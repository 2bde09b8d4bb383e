"""langchain-openai and litellm, as they come, against `pdserve up` with the packaged model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from tests.support.foreign_clients import SMALL
from tests.support.processes import LocalCluster

MODEL = "smollm2-135m"
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 16},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
CITY: dict[str, Any] = {
    "title": "City",
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "size": {"type": "integer", "maximum": 99}},
    "required": ["city", "size"],
    "additionalProperties": False,
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), SMALL.needed]

HEAD = """
import json, sys
url, model, weather, city = sys.argv[1], sys.argv[2], *map(json.loads, sys.argv[3:])
capital, forecast = "What is the capital of France?", "What is the weather in Paris, in celsius?"
tool = {"type": "function", "function": {"name": "get_weather", "parameters": weather}}
def say(name, value):
    print(json.dumps([name, value]), flush=True)
"""
LANGCHAIN = """
from functools import reduce
from operator import add
import openai
from langchain_openai import ChatOpenAI, OpenAI
how = dict(model=model, base_url=url, api_key="none", temperature=0, max_tokens=80, max_retries=0)
chat = ChatOpenAI(stream_usage=True, **how)
whole, parts = chat.invoke(capital), reduce(add, chat.stream(capital))
say("chat", [whole.content, whole.usage_metadata["output_tokens"], whole.usage_metadata["input_tokens"]])
say("parts", [parts.content, parts.usage_metadata["output_tokens"], parts.usage_metadata["input_tokens"]])
demanding = chat.bind_tools([tool], tool_choice="get_weather")
say("calls", [(call["name"], call["args"]) for call in demanding.invoke(forecast).tool_calls])
say("streamed calls", [(call["name"], call["args"]) for call in reduce(add, demanding.stream(forecast)).tool_calls])
formed = chat.with_structured_output(city, method="json_schema", include_raw=True).invoke(capital)
say("formed", [formed["parsed"], repr(formed["parsing_error"])])
newer = ChatOpenAI(use_responses_api=True, **how)
say("response", newer.invoke(capital).text)
say("response parts", "".join(part.text for part in newer.stream(capital)))
say("batch", OpenAI(**{**how, "max_tokens": 5}).batch(["One, two,", "Paris is"]))
try:
    ChatOpenAI(**{**how, "temperature": -1}).invoke(capital)
except openai.BadRequestError as error:
    say("refused", str(error))
"""
LITELLM = """
import litellm
how = dict(model=f"openai/{model}", api_base=url, api_key="none", temperature=0)
def ask(text, **more):
    asked = [{"role": "user", "content": text}]
    return litellm.completion(messages=asked, **{**how, "max_tokens": 80, **more})
def joined(stream):
    return litellm.stream_chunk_builder(list(stream))
def calls(answer):
    return [(call.function.name, json.loads(call.function.arguments)) for call in answer.choices[0].message.tool_calls]
whole, parts = ask(capital), joined(ask(capital, stream=True, stream_options={"include_usage": True}))
say("chat", [whole.choices[0].message.content, whole.usage.completion_tokens, whole.usage.prompt_tokens])
say("parts", [parts.choices[0].message.content, parts.usage.completion_tokens, parts.usage.prompt_tokens])
named = {"type": "function", "function": {"name": "get_weather"}}
say("calls", calls(ask(forecast, tools=[tool], tool_choice=named)))
say("streamed calls", calls(joined(ask(forecast, tools=[tool], tool_choice=named, stream=True))))
form = {"type": "json_schema", "json_schema": {"name": "city", "schema": city, "strict": True}}
say("formed", [json.loads(ask(capital, response_format=form).choices[0].message.content), "None"])
response = litellm.responses(input=capital, max_output_tokens=80, **how)
say("response", response.output[0].content[0].text)
stream = litellm.responses(input=capital, max_output_tokens=80, stream=True, **how)
say("response parts", "".join(event.delta for event in stream if event.type == "response.output_text.delta"))
batch = litellm.text_completion(prompt=["One, two,", "Paris is"], max_tokens=5, **how)
say("batch", [choice.text for choice in batch.choices])
try:
    ask(capital, temperature=-1)
except litellm.BadRequestError as error:
    say("refused", str(error))
"""


def said_by(cluster: LocalCluster, script: str, folder: Path) -> dict[str, Any]:
    """What a script said, by name."""
    told = (f"{cluster.http}/v1", MODEL, json.dumps(WEATHER), json.dumps(CITY))
    out = SMALL.run("python", "-c", HEAD + script, *told, folder=folder)
    return dict(json.loads(line) for line in out.splitlines() if line.startswith('["'))


@pytest.mark.parametrize("script", [LANGCHAIN, LITELLM], ids=["langchain", "litellm"])
def test_a_client(smollm2_cluster: LocalCluster, tmp_path: Path, script: str) -> None:
    said = said_by(smollm2_cluster, script, tmp_path)
    text, num_tokens, num_prompt_tokens = said["chat"]
    assert "Paris" in text and 1 <= num_tokens <= 80 and num_prompt_tokens > num_tokens
    assert said["parts"] == said["chat"]
    ((name, arguments),) = said["calls"]
    assert name == "get_weather"
    Draft202012Validator(WEATHER).validate(arguments)
    assert said["streamed calls"] == said["calls"]
    formed, error = said["formed"]
    assert error == "None"
    Draft202012Validator(CITY).validate(formed)
    assert said["response"] == said["response parts"] == text
    assert len(said["batch"]) == 2 and all(said["batch"])
    assert "temperature" in said["refused"]
