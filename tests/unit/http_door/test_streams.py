"""Streams: their parts, comments, errors, and clients that leave or don't read."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest

from pdserve import errors
from pdserve.request import Event, GenerateRequest
from pdserve.service.address import split_address
from tests.support.http_calls import call, request_bytes, sending, stream
from tests.unit.http_door.scripted import STARTED, ScriptedBackend, finished, opened, raising, tokens

ASKED: dict[str, Any] = {"prompt": "x", "stream": True}


async def events_of(address: str, body: dict[str, Any], path: str = "/v1/completions") -> list[Any]:
    async with stream(address, path, body) as answer:
        assert answer.status == 200
        return [event async for event in answer.events()]


async def test_usage_is_the_last_part_and_has_no_choices() -> None:
    async with opened(ScriptedBackend()) as door:
        *parts, usage, done = await events_of(
            door.address, ASKED | {"stream_options": {"include_usage": True}}
        )
    assert done == "[DONE]"
    assert all(part["usage"] is None and len(part["choices"]) == 1 for part in parts)
    assert usage["choices"] == []
    assert usage["usage"] == {
        "prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 2},
    }  # fmt: skip


async def test_usage_may_be_told_in_every_part() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with opened(ScriptedBackend()) as door:
        *parts, _ = await events_of(door.address, ASKED | {"stream_options": options})
    assert [part["usage"]["completion_tokens"] for part in parts] == [1, 2, 2, 2]


@pytest.mark.parametrize("streams", [True, False])
async def test_tokens_of_a_chat_may_be_named_by_their_ids(streams: bool) -> None:
    body = {
        "messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 2,
        "return_tokens_as_token_ids": True, "stream": streams,
    }  # fmt: skip
    async with opened(ScriptedBackend()) as door:
        if streams:
            parts = (await events_of(door.address, body, "/v1/chat/completions"))[:-1]
        else:
            parts = [(await call(door.address, "/v1/chat/completions", body)).json]
    rows = [row for part in parts for row in (part["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert [(row["token"], row["bytes"]) for row in rows] == [("token_id:97", [97]), ("token_id:98", [98])]
    assert [top["token"] for top in rows[0]["top_logprobs"]] == ["token_id:97", "token_id:98"]


async def test_choices_of_all_prompts_are_numbered_one_behind_the_other() -> None:
    body = {"prompt": ["x", [7, 8], "y"], "n": 2, "stream": True}
    async with opened(backend := ScriptedBackend()) as door:
        *parts, _ = await events_of(door.address, body)
        whole = (await call(door.address, "/v1/completions", body | {"stream": False})).json
    texts = dict.fromkeys(range(6), "")
    for part in parts:
        (choice,) = part["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == dict.fromkeys(range(6), "ab")
    assert [choice["text"] for choice in whole["choices"]] == ["ab"] * 6
    assert whole["usage"]["prompt_tokens"] == 12
    assert [request.input for request in backend.requests[:3]] == ["x", (7, 8), "y"]


@pytest.mark.parametrize("num_prompts", [1, 2])
async def test_comments_keep_a_stream_open_whenever_nothing_comes(num_prompts: int) -> None:
    first, second = asyncio.Event(), asyncio.Event()

    async def slow(request: GenerateRequest) -> AsyncGenerator[Event, None]:
        await first.wait()
        yield STARTED
        yield tokens("a")
        await second.wait()
        yield finished()

    async with opened(ScriptedBackend(slow), comment_s=0.05) as door:
        body = ASKED | {"prompt": ["x"] * num_prompts}
        async with stream(door.address, "/v1/completions", body) as answer:
            lines = answer.lines()
            assert [await anext(lines) for _ in range(3)] == [": wait"] * 3
            first.set()
            middle = [line async for line in _until_comments(lines, 3)]
            second.set()
            rest = [line async for line in lines]
    assert sum(line.startswith("data: {") for line in middle) == num_prompts
    assert sum(line.startswith("data: {") for line in rest) == num_prompts
    assert rest[-1] == "data: [DONE]"


async def test_a_refusal_behind_a_comment_names_the_field_of_its_endpoint() -> None:
    may_refuse = asyncio.Event()

    async def refused(request: GenerateRequest) -> AsyncGenerator[Event, None]:
        await may_refuse.wait()
        yield STARTED
        raise errors.InvalidRequest("prompt can't fit the window")

    async with opened(ScriptedBackend(refused), comment_s=0.05) as door:
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True}
        async with stream(door.address, "/v1/chat/completions", body) as answer:
            lines = answer.lines()
            assert await anext(lines) == ": wait"
            may_refuse.set()
            (told,) = [json.loads(line[6:]) async for line in lines if line.startswith("data: ")]
    assert told["error"]["param"] == "messages"


async def _until_comments(lines: AsyncIterator[str], num_comments: int) -> AsyncIterator[str]:
    """Lines to the last of so many comments in a row, with something before them."""
    num_last, has_part = 0, False
    async for line in lines:
        yield line
        is_comment = line == ": wait"
        has_part = has_part or not is_comment
        num_last = num_last + 1 if is_comment else 0
        if num_last >= num_comments and has_part:
            return


@pytest.mark.parametrize("num_prompts", [1, 2])
async def test_an_error_in_the_middle_is_an_event_and_nothing_is_done(num_prompts: int) -> None:
    async def breaks(request: GenerateRequest) -> AsyncGenerator[Event, None]:
        yield STARTED
        yield tokens("a")
        raise errors.WorkerLost("a worker is gone", worker="d0")

    async with opened(ScriptedBackend(breaks)) as door:
        *parts, last = await events_of(door.address, ASKED | {"prompt": ["x"] * num_prompts})
    assert parts
    assert last == {
        "error": {
            "message": "a worker is gone (worker=d0)", "type": "server_error", "param": None, "code": None,
        }
    }  # fmt: skip


async def test_an_error_behind_a_comment_is_an_event_too() -> None:
    late = errors.DeadlineExceeded("the deadline has passed")
    async with opened(ScriptedBackend(raising(late, after_s=0.1)), comment_s=0.02) as door:
        (event,) = await events_of(door.address, ASKED)
    assert event["error"]["message"] == "the deadline has passed"


@pytest.mark.parametrize("streams", [True, False])
async def test_a_client_that_leaves_before_the_first_part_ends_its_request(streams: bool) -> None:
    begun = asyncio.Event()

    async def never(request: GenerateRequest) -> AsyncGenerator[Event, None]:
        begun.set()
        await asyncio.Event().wait()
        yield STARTED

    async with opened(backend := ScriptedBackend(never)) as door:
        host, port = split_address(door.address)
        _, writer = await asyncio.open_connection(host, port)
        body = b'{"prompt": "x", "stream": %s}' % (b"true" if streams else b"false")
        writer.write(request_bytes("POST", "/v1/completions", body))
        await begun.wait()
        writer.close()
        async with asyncio.timeout(30):
            await backend.closed.wait()
        await door.counts("pdserve_http_disconnects_total", 1, endpoint="/v1/completions")
        assert backend.num_visits == 0
        assert door.count("pdserve_http_streams") == 0


async def endless(request: GenerateRequest) -> AsyncGenerator[Event, None]:
    yield STARTED
    index = 0
    while True:
        yield tokens("a" * 1000, first_index=index)
        index += 1000
        await asyncio.sleep(0)


async def test_a_client_that_leaves_in_the_middle_ends_its_request() -> None:
    async with opened(backend := ScriptedBackend(endless)) as door:
        async with stream(door.address, "/v1/completions", ASKED) as answer:
            await anext(answer.events())
        async with asyncio.timeout(30):
            await backend.closed.wait()


async def test_a_client_that_does_not_read_is_given_up() -> None:
    async with opened(backend := ScriptedBackend(endless), stall_s=0.3) as door:
        host, port = split_address(door.address)
        silent = socket.create_connection((host, port))
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        silent.sendall(request_bytes("POST", "/v1/completions", b'{"prompt": "x", "stream": true}'))
        async with asyncio.timeout(30):
            await backend.closed.wait()
        silent.close()


async def test_requests_on_one_connection_follow_each_other() -> None:
    body = b'{"prompt": "x"}'
    raw = request_bytes("POST", "/v1/completions", body) * 3
    async with opened(ScriptedBackend()) as door, sending(door.address, raw) as answer:
        assert answer.status == 200
        first = [part async for part in answer.parts()]
        assert first and b'"text":"ab"' in first[0]
        await door.counts("pdserve_http_requests_total", 3, endpoint="/v1/completions", status="200")
