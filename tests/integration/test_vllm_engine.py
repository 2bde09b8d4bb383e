"""vLLM's engine service of a router, asked by another project's stubs: streams and whole answers, errors, keys."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from random import Random
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.client import AsyncClient
from pdserve.rpc.v1 import vllm_engine_pb2 as pb
from pdserve.rpc.v1.vllm_engine_pb2_grpc import VllmEngineStub
from pdserve.service.rpc import VLLM_ENGINE
from tests.support.asking import Question, at_rest
from tests.support.processes import run_cli
from tests.support.singles import Single, Singles
from tests.support.vllm_gateway import fields, in_child
from tests.support.waiting import until

HEARTBEAT_S = 0.1
FLAGS = ("--timeouts.heartbeat-s", f"{HEARTBEAT_S}")
FAKE = ("--engine", "fake", "--engine.num-blocks", "512")
SLOW = ("--engine.fake-step-s", "0.005")
LONG = Question.draw(Random(9), 64, 6_000)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Singles]:
    with Singles(tmp_path_factory.mktemp("vllm"), *FLAGS) as singles:
        singles.router("r0")
        for role, name in (("prefill", "p0"), ("decode", "d0")):
            singles.worker(role, name, *FAKE, *SLOW)
        yield singles.start()


@pytest.fixture
async def router(cluster: Singles) -> AsyncIterator[Single]:
    [router] = cluster.routers
    async with AsyncClient(router.address) as client:
        await at_rest(client, ["d0", "p0"], heartbeat_s=HEARTBEAT_S)
        yield router
        await at_rest(client, ["d0", "p0"], heartbeat_s=HEARTBEAT_S)


async def call(router: Single, method: str, body: dict[str, Any], key: str = "") -> dict[str, Any]:
    """status, details, and what came: by the foreign stubs."""
    said: dict[str, Any] = await in_child("call", router.address, method, json.dumps(body), key)
    return said


def asked(question: Question, *, stream: bool, **params: Any) -> dict[str, Any]:
    """By ids, with what else vLLM's parameters have."""
    return {
        "request_id": "",
        "tokenized": {"original_text": "not read", "input_ids": list(question.prompt_ids)},
        "sampling_params": {"max_tokens": question.max_tokens, "seed": question.seed & 0x7FFF_FFFF, **params},
        "stream": stream,
    }


def drawn(number: int, num_prompt_tokens: int = 40, max_tokens: int = 12) -> Question:
    """One whose seed vLLM's field holds."""
    question = Question.draw(Random(number), num_prompt_tokens, max_tokens)
    return Question(
        prompt_ids=question.prompt_ids, max_tokens=max_tokens, seed=(question.seed & 0x7FFF_FFFF) | 1
    )


async def test_names_and_numbers_are_those_of_its_gateways() -> None:
    theirs, ours = await in_child("fields"), json.loads(json.dumps(fields(pb.DESCRIPTOR)))
    for message, of_message in ours.items():
        assert of_message.items() <= theirs[message].items(), message


async def test_a_stream_of_ids(router: Single) -> None:
    question = drawn(1)
    said = await call(router, "Generate", asked(question, stream=True))
    assert said["status"] == "OK"
    *chunks, last = said["got"]
    ids = [each for chunk in chunks for each in chunk["chunk"]["token_ids"]]
    assert ids == question.answer
    assert all(chunk["chunk"]["prompt_tokens"] == 40 for chunk in chunks)
    assert sum(chunk["chunk"]["completion_tokens"] for chunk in chunks) == 12
    complete = last["complete"]
    assert complete["finish_reason"] == "length"
    assert complete["output_ids"] == chunks[-1]["chunk"]["token_ids"]


async def test_a_whole_answer_of_two_choices_with_logprobs(router: Single) -> None:
    question = drawn(2)
    body = asked(question, stream=False, n=2, logprobs=2, prompt_logprobs=1)
    said = await call(router, "Generate", body)
    assert said["status"] == "OK", said
    first, second = sorted((each["complete"] for each in said["got"]), key=lambda each: each.get("index", 0))
    assert first["output_ids"] == question.answer and second["index"] == 1
    for complete in (first, second):
        assert complete["completion_tokens"] == 12 and complete["prompt_tokens"] == 40
        scores = complete["output_logprobs"]
        assert scores["token_ids"] == complete["output_ids"] and len(scores["token_logprobs"]) == 12
        assert [len(top["token_ids"]) for top in scores["top_logprobs"]] == [2] * 12
        prompt = complete["input_logprobs"]
        assert prompt["token_ids"] == list(question.prompt_ids)
        assert ["value" in each for each in prompt["token_logprobs"]] == [False] + [True] * 39


async def test_text_a_stop_and_cached_tokens(router: Single) -> None:
    body = {
        "text": "The quick brown fox jumps over the lazy dog, again and again. " * 2,
        "sampling_params": {},
    }
    first = await call(router, "Generate", {**body, "sampling_params": {"max_tokens": 8, "temperature": 0}})
    ids = first["got"][0]["complete"]["output_ids"]
    params = {"max_tokens": 8, "temperature": 0, "stop_token_ids": [ids[2]]}
    again = await call(router, "Generate", {**body, "sampling_params": params})
    complete = again["got"][0]["complete"]
    assert complete["finish_reason"] == "stop" and complete["matched_token_id"] == ids[2]
    assert complete["output_ids"] == ids[: ids.index(ids[2]) + 1]
    assert complete["cached_tokens"] >= 16


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mm_inputs": {}}, "mm_inputs isn't supported"),
        ({"kv_transfer_params_json": "{}"}, "kv_transfer_params_json isn't supported"),
        ({"data_parallel_rank": 1}, "data_parallel_rank must be 0"),
        ({"sampling_params": {"structural_tag": "x"}}, "structural_tag isn't supported"),
        ({"sampling_params": {"logprobs": -1}}, "logprobs out of range"),
        ({"sampling_params": {"stop": ["x"] * 17}}, "stop has too many entries"),
        ({"sampling_params": {"logit_bias": {"-1": 1.0}}}, "logit_bias holds an id outside the vocabulary"),
        ({"request_id": "not a name"}, "request_id must be"),
        ({"tokenized": {"input_ids": []}}, "token_ids must not be empty"),
        ({"tokenized": {"input_ids": [9_999_999]}}, "token_ids holds an id outside the vocabulary"),
    ],
)
async def test_what_cannot_be_done_is_refused(router: Single, change: dict[str, Any], words: str) -> None:
    said = await call(router, "Generate", {**asked(drawn(3), stream=True), **change})
    assert said["status"] == "INVALID_ARGUMENT" and words in said["details"] and said["got"] == []


async def test_a_request_without_a_prompt(router: Single) -> None:
    said = await call(router, "Generate", {"stream": True})
    assert said["status"] == "INVALID_ARGUMENT" and "exactly one of tokenized, text" in said["details"]


async def test_an_abort_ends_a_stream_and_those_that_are_gone_are_no_error(router: Single) -> None:
    body = {**asked(LONG, stream=True), "request_id": "to-be-aborted"}
    running = asyncio.create_task(call(router, "Generate", body))

    async def runs() -> bool:
        return await router.metric("pdserve_requests_running") == 1

    await until("it runs", runs)
    aborted = await call(router, "Abort", {"request_ids": ["never-was", "to-be-aborted"]})
    assert aborted["status"] == "OK"
    said = await running
    assert said["status"] == "CANCELLED" and "aborted" in said["details"]


async def test_a_client_that_leaves_ends_its_request(router: Single) -> None:
    request = pb.GenerateRequest(
        tokenized=pb.TokenizedInput(input_ids=LONG.prompt_ids),
        sampling_params=pb.SamplingParams(max_tokens=LONG.max_tokens),
        stream=True,
    )
    async with grpc.aio.insecure_channel(router.address) as channel:
        stream: Any = VllmEngineStub(channel).Generate(request)
        await stream.read()
        stream.cancel()

    async def ended() -> bool:
        return await router.metric("pdserve_requests_running") == 0

    await until("it has ended", ended)


async def test_health_model_and_server(router: Single) -> None:
    assert (await call(router, "HealthCheck", {}))["got"] == [{"healthy": True}]
    [model] = (await call(router, "GetModelInfo", {}))["got"]
    assert model["served_model_name"] == model["model_path"] == "fake" and model["is_generation"] is True
    assert model["max_context_length"] == 512 * 16 and model["vocab_size"] > 250
    [server] = (await call(router, "GetServerInfo", {}))["got"]
    assert server["server_type"] == "pdserve" and server["data_parallel_size"] == 1
    assert server["uptime_seconds"] > 0 and "is_paused" not in server
    async with grpc.aio.insecure_channel(router.address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=VLLM_ENGINE))
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_keys_and_their_limits_count_here_too(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    acme, bigco = (
        add_key(file, "--tenant", "acme", "--max-concurrent", "1"),
        add_key(file, "--tenant", "bigco"),
    )
    ops = add_key(file, "--tenant", "ops", "--admin")
    with Singles(tmp_path, *FLAGS) as singles:
        router = singles.router("r0", "--router.keys-file", str(file))
        for role, name in (("prefill", "p0"), ("decode", "d0")):
            singles.worker(role, name, *FAKE, *SLOW)
        singles.start()
        async with AsyncClient(router.address, api_key=ops) as client:
            await at_rest(client, ["d0", "p0"], heartbeat_s=HEARTBEAT_S)
        for method in ("Generate", "Abort", "GetModelInfo", "GetServerInfo"):
            said = await call(router, method, {})
            assert (said["status"], said["details"]) == ("UNAUTHENTICATED", "no valid API key"), method
        assert (await call(router, "HealthCheck", {}))["got"] == [{"healthy": True}]
        body = {**asked(LONG, stream=True), "request_id": "mine"}
        running = asyncio.create_task(call(router, "Generate", body, acme))

        async def runs() -> bool:
            return await router.metric("pdserve_requests_running") == 1

        await until("it runs", runs)
        second = await call(router, "Generate", asked(drawn(4), stream=True), acme)
        assert second["status"] == "RESOURCE_EXHAUSTED", "one at a time"
        assert (await call(router, "Abort", {"request_ids": ["mine"]}, bigco))["status"] == "OK"
        [of_bigco] = (await call(router, "GetServerInfo", {}, bigco))["got"]
        assert "active_requests" not in of_bigco and await runs(), "another tenant's is nobody's"
        await call(router, "Abort", {"request_ids": ["mine"]}, acme)
        assert (await running)["status"] == "CANCELLED"


def add_key(file: Path, *arguments: str) -> str:
    """A new key, by command."""
    made = run_cli("keys", "add", "--file", str(file), *arguments)
    assert made.returncode == 0, made.stderr
    return made.stdout.strip()
