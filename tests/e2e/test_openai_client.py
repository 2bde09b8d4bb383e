"""OpenAI's own client, as it comes, against `pdserve up` with the packaged model; and HTTP beside gRPC."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from jsonschema import Draft202012Validator

from pdserve.client import AsyncClient, Client
from pdserve.request import GenerateRequest
from pdserve.sampling import SamplingParams
from tests.support.asking import at_rest
from tests.support.processes import LocalCluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MODEL = "smollm2-135m"
QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "size": {"type": "integer", "maximum": 99}},
    "required": ["city", "size"],
    "additionalProperties": False,
}


@pytest.fixture
def cluster(smollm2_cluster: LocalCluster) -> LocalCluster:
    return smollm2_cluster


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.http}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_models_and_chat(client: openai.OpenAI, cluster: LocalCluster) -> None:
    (card,) = client.models.list().data
    assert client.models.retrieve(card.id).id == card.id
    answer = client.chat.completions.create(
        model=card.id, messages=QUESTION, temperature=0, max_completion_tokens=12
    )
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.usage is not None and answer.usage.completion_tokens <= 12
    with Client(cluster.target) as grpc:
        want = grpc.generate_text(
            GenerateRequest(
                input=grpc_chat("What is the capital of France?"),
                sampling=SamplingParams(temperature=0, max_tokens=12),
            )
        )
    assert answer.choices[0].message.content == want.text


def grpc_chat(text: str) -> Any:
    from pdserve.request import Chat, ChatMessage

    return Chat((ChatMessage("user", text),))


def test_streams_say_what_the_whole_says(client: openai.OpenAI, cluster: LocalCluster) -> None:
    asked: Any = {"model": MODEL, "messages": QUESTION, "temperature": 0.8, "seed": 5, "max_tokens": 30}
    client.chat.completions.create(**asked)  # both find what it leaves in the caches
    rest(cluster)
    whole = client.chat.completions.create(**asked)
    rest(cluster)
    stream = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage and not chunks[-1].choices
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason


def rest(cluster: LocalCluster) -> None:
    """Wait until all blocks are back in the caches, where the next request finds them."""

    async def wait() -> None:
        async with AsyncClient(cluster.target) as client:
            await at_rest(client, ["decode-0", "prefill-0"])

    asyncio.run(wait())


async def test_the_client_without_threads(cluster: LocalCluster) -> None:
    async with openai.AsyncOpenAI(base_url=f"{cluster.http}/v1", api_key="none", max_retries=0) as client:
        asked: Any = {"model": MODEL, "prompt": "Once upon a time", "temperature": 0, "max_tokens": 8}
        whole = await client.completions.create(**asked)
        parts = [part async for part in await client.completions.create(**asked, stream=True)]
        assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text


def test_the_default_of_completions_is_openais(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="1 2 3 4", extra_body={"ignore_eos": True})
    assert answer.usage is not None and answer.usage.completion_tokens == 16


def test_logprobs_in_both_shapes(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=6, logprobs=True, top_logprobs=3
    )
    logprobs = chat.choices[0].logprobs
    assert logprobs is not None and logprobs.content
    assert "".join(each.token for each in logprobs.content) == chat.choices[0].message.content
    for each in logprobs.content:
        assert len(each.top_logprobs) == 3
        assert each.logprob == each.top_logprobs[0].logprob  # greedy
        assert bytes(each.bytes or ()).decode() == each.token
    done = client.completions.create(
        model=MODEL, prompt="The capital of France is", temperature=0, max_tokens=4, logprobs=2, echo=True
    )
    found = done.choices[0].logprobs
    assert found is not None and found.tokens and found.token_logprobs and found.text_offset
    assert "".join(found.tokens) == done.choices[0].text
    first, *others = list[float | None](found.token_logprobs)
    assert first is None and all(each is not None and each <= 0 for each in others)
    offsets = [len("".join(found.tokens[:at])) for at in range(len(found.tokens))]
    assert found.text_offset == offsets


def test_the_sum_of_a_prompts_logprobs_is_that_of_grpc(client: openai.OpenAI, cluster: LocalCluster) -> None:
    prompt = "Rain falls from clouds."
    answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=0, logprobs=0, echo=True)
    found = answer.choices[0].logprobs
    assert found is not None and found.token_logprobs
    with Client(cluster.target) as grpc:
        want = grpc.generate_text(
            GenerateRequest(input=prompt, sampling=SamplingParams(max_tokens=0, prompt_logprobs=0))
        )
    total = sum(each for each in found.token_logprobs if each is not None)
    assert math.isclose(total, sum(each.logprob for each in want.prompt_logprobs), rel_tol=1e-6)


def test_response_format_is_kept(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "city", "strict": True, "schema": SCHEMA}}
    for seed in range(3):
        answer = client.chat.completions.create(
            model=MODEL, messages=QUESTION, max_tokens=80, seed=seed, response_format=form
        )
        assert answer.choices[0].finish_reason == "stop"
        Draft202012Validator(SCHEMA).validate(json.loads(answer.choices[0].message.content or ""))


def test_several_choices_and_prompts(client: openai.OpenAI) -> None:
    prompts: Any = ["One", [504, 253], "Two"]
    answer = client.completions.create(model=MODEL, prompt=prompts, n=2, max_tokens=3, temperature=0)
    assert [choice.index for choice in answer.choices] == list(range(6))
    chat = client.chat.completions.create(model=MODEL, messages=QUESTION, n=3, max_tokens=4, seed=1)
    assert len({choice.message.content for choice in chat.choices}) > 1


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="gpt-4", prompt="x")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model=MODEL, prompt="x", temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=MODEL, prompt="x", max_tokens=1_000_000)
    assert long.value.code == "context_length_exceeded"
