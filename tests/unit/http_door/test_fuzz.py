"""Bodies and byte streams that no client would send: always a status, nothing crashes, nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from typing import Any

import pytest
from starlette.types import ASGIApp, Message

from pdserve.service.address import split_address
from tests.support.http_calls import call, request_bytes
from tests.unit.http_door.scripted import ScriptedBackend, made_app, opened

FEW, MANY = 3_000, 100_000
FEW_STREAMS, MANY_STREAMS = 150, 3_000
AT_ONCE = 32
STATUSES = {200, 400, 404, 405, 408, 411, 413, 431}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "héllo 🕰", "max_tokens": 5, "stop": ["a", "b"], "logit_bias": {"7": 1.5}}),
    ("/v1/completions", {"prompt": [1, 2, 3], "n": 2, "best_of": 3, "logprobs": 2, "echo": True}),
    ("/v1/completions", {"prompt": ["a", [1, 2]], "stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/completions", {"prompt": "x", "structured_outputs": {"json": SCHEMA}, "priority": -3}),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "hi"}], "top_logprobs": 3, "logprobs": True},
    ),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "tools": [FUNCTION]}),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "x"}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
            "chat_template_kwargs": {"enable_thinking": False},
        },
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "tools": [FUNCTION], "tool_choice": "required"},
    ),
    ("/v1/responses", {"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}]}),
    ("/v1/responses", {"input": "x", "max_output_tokens": 7, "instructions": "be kind"}),
    ("/v1/responses", {"input": [{"role": "user", "content": "x"}], "tools": [], "stream": True}),
    ("/tokenize", {"prompt": "hello", "return_token_strs": True}),
    ("/tokenize", {"messages": [{"role": "user", "content": "x"}]}),
    ("/detokenize", {"tokens": [104, 105]}),
]
NASTY = (
    b"NaN", b"Infinity", b"-0", b"1e999", b"-1e999", b"1" * 400, b"0.1" + b"0" * 300, b"null", b"true",
    b'""', b"[]", b"{}",
    b"[" * 2000, b'{"a":' * 600, b'"\\ud800"', b'"\\udc00\\ud800"', b'"\xff\xfe"', b'"\xc3"', b"\x00", b'"\\u0000"',
    b'"prompt":"x",', b'"n":1,"n":2,', b'"' + b"a" * 5000 + b'"', b"-1", b"4294967296",
    b"18446744073709551616", b'"\xf0\x9f\x95"',
    b'[{"role":[]}]', b"1.5", b"\xef\xbb\xbf", b",", b"}", b"/*", b"'x'",
)  # fmt: skip


def spoiled(source: random.Random, body: bytes) -> bytes:
    """One to four changes: bytes, cuts, repetitions, values in place of others."""
    for _ in range(source.randint(1, 4)):
        at = source.randrange(len(body) + 1)
        upto = min(len(body), at + source.randint(0, 12))
        match source.randrange(6):
            case 0:
                body = body[:at] + bytes((source.randrange(256),)) + body[at + 1 :]
            case 1:
                body = body[:at] + source.choice(NASTY) + body[upto:]
            case 2:
                body = body[:at] + body[upto:]
            case 3:
                body = body[:at] + body[at:upto] * source.randint(2, 50) + body[upto:]
            case 4:
                colon = body.find(b":", at)
                end = min(
                    (found for mark in b",}" if (found := body.find(mark, colon)) > 0), default=len(body)
                )
                body = body[: colon + 1] + source.choice(NASTY) + body[end:] if colon > 0 else body
            case 5:
                body = body[:at]
    return body


async def status_of(app: ASGIApp, path: str, body: bytes, source: random.Random) -> int:
    """The app's answer to a body that comes in two parts, cut anywhere."""
    cut = source.randrange(len(body) + 1)
    parts: list[Message] = [
        {"type": "http.request", "body": body[:cut], "more_body": True},
        {"type": "http.request", "body": body[cut:], "more_body": False},
    ]
    statuses: list[int] = []
    is_whole = False

    async def receive() -> Message:
        if parts:
            return parts.pop(0)
        return await asyncio.Future()

    async def send(message: Message) -> None:
        nonlocal is_whole
        if message["type"] == "http.response.start":
            statuses.append(message["status"])
        else:
            is_whole = not message.get("more_body", False)

    scope = {
        "type": "http", "http_version": "1.1", "method": "POST", "path": path, "raw_path": path.encode(),
        "root_path": "", "query_string": b"", "scheme": "http", "server": ("x", 1), "client": ("y", 2),
        "headers": [(b"content-length", str(len(body)).encode())],
    }  # fmt: skip
    async with asyncio.timeout(30):
        await app(scope, receive, send)
    assert is_whole, (path, body)
    (status,) = statuses
    return status


async def fuzz_bodies(count: int) -> None:
    source = random.Random(f"bodies/{count}")
    backend = ScriptedBackend()
    app = made_app(backend)
    num_tasks = len(asyncio.all_tasks())
    found: dict[int, int] = {}
    for _ in range(count):
        path, body = source.choice(BODIES)
        raw = spoiled(source, json.dumps(body, ensure_ascii=source.random() < 0.5).encode())
        status = await status_of(app, path, raw, source)
        assert status in STATUSES, (status, path, raw)
        found[status] = found.get(status, 0) + 1
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == num_tasks
    assert backend.num_visits == 0
    assert found[200] > count // 50 and found[400] > count // 3, found


async def fuzz_streams(count: int) -> None:
    """Raw bytes, many connections at a time; then the door is as it was."""
    source = random.Random(f"streams/{count}")
    async with opened(backend := ScriptedBackend(), stall_s=1.0) as door:
        host, port = split_address(door.address)
        num_tasks = len(asyncio.all_tasks())
        places = asyncio.Semaphore(AT_ONCE)

        async def one(raw: bytes, cuts: list[int]) -> None:
            async with places:
                reader, writer = await asyncio.open_connection(host, port)
                with contextlib.suppress(ConnectionError):
                    for begin, end in zip([0, *cuts], [*cuts, len(raw)]):
                        writer.write(raw[begin:end])
                        await writer.drain()
                        await asyncio.sleep(0)
                    async with asyncio.timeout(30):  # it answers, or says that it waited long enough
                        assert (await reader.read(9)).startswith(b"HTTP/1.1 "), raw[:300]
                writer.close()
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()

        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                path, body = source.choice(BODIES)
                raw = request_bytes("POST", path, json.dumps(body).encode(), headers_of(source))
                raw = spoiled(source, raw) if source.random() < 0.8 else raw
                cuts = sorted(source.sample(range(len(raw)), min(len(raw), source.randint(0, 5))))
                group.create_task(one(raw, cuts))
        assert (await call(door.address, "/version")).status == 200
        await door.counts("pdserve_http_streams", 0)
        async with asyncio.timeout(30):
            while len(asyncio.all_tasks()) > num_tasks:
                await asyncio.sleep(0.05)
        assert backend.num_visits == 0


def headers_of(source: random.Random) -> dict[str, str]:
    """At times ones that mean something, or too much."""
    drawn = source.randrange(12)
    return {
        0: {"Transfer-Encoding": "chunked"}, 1: {"Expect": "100-continue"},
        2: {"Connection": "Upgrade", "Upgrade": "h2c"},
        3: {"Content-Length": "99999999999999999999"}, 4: {"Content-Length": "-1"}, 5: {"X": "y" * 100_000},
        6: {"Connection": "close"}, 7: {"Authorization": "Bearer \xff\x00"},
    }.get(drawn, {})  # fmt: skip


async def test_some_bodies() -> None:
    await fuzz_bodies(FEW)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_many_bodies() -> None:
    await fuzz_bodies(MANY)


async def test_some_streams() -> None:
    await fuzz_streams(FEW_STREAMS)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_many_streams() -> None:
    await fuzz_streams(MANY_STREAMS)


async def test_ten_megabytes_of_headers_are_not_taken_in() -> None:
    async with opened(ScriptedBackend()) as door:
        host, port = split_address(door.address)
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"GET /version HTTP/1.1\r\n")
        with contextlib.suppress(ConnectionError):
            for number in range(10_000):
                writer.write(f"X-{number}: {'y' * 1000}\r\n".encode())
                await writer.drain()
        with contextlib.suppress(ConnectionError):
            assert (await reader.read()).startswith(b"HTTP/1.1 431 ")
        writer.close()
        assert (await call(door.address, "/version")).status == 200
