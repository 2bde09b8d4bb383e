"""Kill -9 of the decode worker in mid-JSON: the stream goes on, the text parses, satisfies its schema, and is the text
of an undisturbed run. Each of the two workers that decode one text has made its matcher from the ids alone.

On the fake engine, and on the packaged model in `deterministic` mode.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import jsonschema
import pytest

from pdserve.client import AsyncClient
from pdserve.request import Finished, GenerateRequest, Tokens
from pdserve.sampling import FinishReason, SamplingParams
from pdserve.structure import Structure
from tests.support.asking import at_rest
from tests.support.processes import LocalCluster, run_cli

HEARTBEAT_S = 0.1
BACK_LIMIT_S = 90.0
COMMON = ("--timeouts.heartbeat-s", f"{HEARTBEAT_S}", "--prefill", "1", "--decode", "1")
FAKE = ("--engine", "fake", "--engine.num-blocks", "1024")
PACKAGED = ("--model", "smollm2-135m", "--deterministic", "--engine.kv-memory-bytes", f"{256 << 20}")
WORKERS = ("prefill-0", "decode-0")
LINES = {
    "type": "array",
    "items": {"type": "string", "minLength": 60, "maxLength": 70},
    "minItems": 12,
    "maxItems": 14,
}
HOME = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 1, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["tea", "chess", "rain"]}, "minItems": 2, "maxItems": 3},
        "home": HOME,
    },
    "required": ["name", "age", "likes", "home"],
    "additionalProperties": False,
}  # fmt: skip


@dataclass(frozen=True)
class Served:
    """A cluster, a request, its schema, and how many tokens the client has when the worker is killed."""

    cluster: LocalCluster
    request: GenerateRequest
    schema: dict[str, Any]
    kill_at: int


def asking(prompt: str, schema: dict[str, Any], max_tokens: int) -> GenerateRequest:
    params = SamplingParams(temperature=0.8, max_tokens=max_tokens, structure=Structure.json_schema(schema))
    return GenerateRequest(input=prompt, seed=7, sampling=params)


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with LocalCluster(tmp_path_factory.mktemp("fake"), *COMMON, *FAKE) as cluster:
        yield Served(cluster, asking("Once upon a time, ", LINES, 2000), LINES, 300)


@pytest.fixture(scope="module")
def packaged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    assert run_cli("fetch", "smollm2-135m", limit_s=300).returncode == 0
    with LocalCluster(tmp_path_factory.mktemp("packaged"), *COMMON, *PACKAGED) as cluster:
        yield Served(cluster, asking("A person as JSON:\n", PERSON, 300), PERSON, 12)


async def test_the_text_is_whole_and_the_same(fake: Served) -> None:
    await kill_in_mid_json(fake)


@pytest.mark.timeout(300)
async def test_the_packaged_models_text_is_whole_and_the_same(packaged: Served) -> None:
    await kill_in_mid_json(packaged)


async def kill_in_mid_json(served: Served) -> None:
    cluster, victim = served.cluster, served.cluster.row("decode")
    killed_at = ""

    def kill(text: str) -> None:
        nonlocal killed_at
        if not killed_at:
            killed_at = text
            cluster.signal(victim, signal.SIGKILL)

    async with AsyncClient(cluster.target) as client:
        expected, undisturbed = await read(client, served.request)
        assert undisturbed.num_attempts == 1
        text, finished = await read(client, served.request, (served.kill_at, kill))
        print(f"killed behind {killed_at!r}: {text!r}")
        with pytest.raises(ValueError):
            json.loads(killed_at)
        assert text.startswith(killed_at)
        assert text == expected
        assert finished.num_attempts == 2
        assert finished.reason is undisturbed.reason is FinishReason.STRUCTURE
        jsonschema.Draft202012Validator(served.schema).validate(json.loads(text))
        await asyncio.to_thread(
            cluster.wait_line, lambda line: line.startswith(f"{victim.id} is back"), BACK_LIMIT_S
        )
        await at_rest(client, WORKERS, heartbeat_s=HEARTBEAT_S)


async def read(
    client: AsyncClient, request: GenerateRequest, when: tuple[int, Callable[[str], None]] | None = None
) -> tuple[str, Finished]:
    """The whole text; `when` so many tokens have come, something is done with the text so far."""
    text, num_tokens = "", 0
    finished: Finished | None = None
    async with aclosing(client.generate(request, deadline_s=200)) as events:
        async for event in events:
            match event:
                case Tokens():
                    text += event.text
                    num_tokens += len(event.token_ids)
                    if when is not None and num_tokens >= when[0]:
                        when[1](text)
                case Finished():
                    finished = event
    assert finished is not None
    return text, finished
