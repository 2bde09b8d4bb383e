"""What is refused: by whom, with which status, before what is read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from http_door.errors import reply_to as reply_to_error
from pdserve import errors
from pdserve.request import Event, GenerateRequest
from tests.support.http_calls import Reply, call, request_bytes, sending
from tests.unit.http_door.scripted import STARTED, ScriptedBackend, opened, raising, tokens


async def reply_to(address: str, raw: bytes) -> Reply:
    async with sending(address, raw) as answer, asyncio.timeout(30):
        return Reply(answer.status, answer.headers, b"".join([part async for part in answer.parts()]))


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (errors.InvalidRequest("top_k out of range", value=1), 400, "invalid_request_error", None),
        (
            errors.InvalidRequest("prompt and max_tokens don't fit the window"),
            400,
            "invalid_request_error",
            "context_length_exceeded",
        ),
        (errors.too_large("message", "too large"), 413, "invalid_request_error", None),
        (errors.Unauthenticated("no valid API key"), 401, "authentication_error", "invalid_api_key"),
        (errors.PermissionDenied("may not"), 403, "permission_error", None),
        (errors.UnknownModel("another"), 404, "invalid_request_error", "model_not_found"),
        (errors.Overloaded("full", retry_after_s=2.2), 429, "rate_limit_error", "rate_limit_exceeded"),
        (errors.RequestCancelled("aborted"), 499, "invalid_request_error", None),
        (errors.InvariantViolated("a bug"), 500, "server_error", None),
        (errors.KvCorrupt("twice"), 500, "server_error", None),
        (errors.WorkerLost("gone"), 503, "server_error", None),
        (errors.NoWorker("none"), 503, "server_error", None),
        (errors.Draining("draining"), 503, "server_error", None),
        (errors.DeadlineExceeded("passed"), 504, "server_error", None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
@pytest.mark.parametrize("streams", [True, False])
async def test_errors_have_their_status_and_form(
    error: errors.PdserveError, status: int, kind: str, code: str | None, streams: bool
) -> None:
    for backend in (ScriptedBackend(raising(error)), ScriptedBackend(refuses=error)):
        async with opened(backend) as door:
            reply = await call(door.address, "/v1/completions", {"prompt": "x", "stream": streams})
            assert reply.status == status
            assert (reply.error["type"], reply.error["code"]) == (kind, code)
            assert reply.headers["content-type"] == "application/json"
            assert door.count("pdserve_http_requests_total", endpoint="/v1/completions", status=str(status))
    if status == 429:
        assert reply.headers["retry-after"] == "3"
    if status == 401:
        assert reply.headers["www-authenticate"] == "Bearer"


async def test_a_bug_is_told_by_a_name_only() -> None:
    async with opened(ScriptedBackend(raising(ZeroDivisionError("a secret")))) as door:
        reply = await call(door.address, "/v1/completions", {"prompt": "x"})
    assert reply.status == 500
    assert reply.error["message"].startswith("internal error, in the server's log as error-")
    assert b"secret" not in reply.body


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "x", "n": "two"}, "n"),
        ({"prompt": "x", "temperature": -1}, "temperature"),
        ({"prompt": "x", "temperature": 1e300}, "temperature"),
        ({"prompt": "x", "top_k": 10**30}, "top_k"),
        ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias"),
        ({"prompt": "x", "stop": ["a"] * 17}, "stop"),
        ({"prompt": "x", "stop": ["a", ""]}, "stop[1]"),
        ({"prompt": ["x", 1]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["x"] * 1025}, "prompt"),
        ({}, "prompt"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "stream_options": {}}, "stream_options"),
        ({"prompt": "x", "guided_json": {}}, "guided_json"),
        ({"prompt": "x", "guided_decoding_backend": "a"}, "guided_decoding_backend"),
        ({"prompt": "x", "guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"prompt": "x", "use_beam_search": True}, "use_beam_search"),
        ({"prompt": "x", "store": True}, "store"),
        ({"prompt": "x", "service_tier": "flex"}, "service_tier"),
        ({"prompt": "x", "response_format": {"type": "yaml"}}, "response_format.type"),
        ({"prompt": "x", "response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"prompt": "x", "structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        (
            {"prompt": "x", "structured_outputs": {"structural_tag": "{}"}},
            "structured_outputs.structural_tag",
        ),
        (
            {"prompt": "x", "structured_outputs": {"json": {}, "disable_any_whitespace": True}},
            "structured_outputs.disable_any_whitespace",
        ),
        ({"prompt": "x", "n": 65}, "n"),
        ({"prompt": "x", "n": 0}, "n"),
        ({"prompt": "x", "request_id": "no spaces"}, "request_id"),
        ({"prompt": "x", "priority": 2000}, "priority"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_bad_field_is_named(body: dict[str, Any], param: str) -> None:
    async with opened(backend := ScriptedBackend()) as door:
        reply = await call(door.address, "/v1/completions", body)
    assert (reply.status, reply.error["param"]) == (400, param), reply.error
    assert not backend.requests


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": "hi"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "x", "content": "y"}]}, "messages[1].role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": "x"}], "functions": []}, "functions"),
        ({"messages": [{"role": "user", "content": "x"}], "modalities": ["audio"]}, "modalities"),
        ({"messages": [{"role": "user", "content": "x"}], "top_logprobs": 3}, "top_logprobs"),
        ({"messages": [{"role": "user", "content": "x"}], "max_tokens": -1}, "max_tokens"),
        (
            {"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": -1},
            "max_completion_tokens",
        ),
        ({"messages": [{"role": "user", "content": "x"}], "echo": True}, "echo"),
        ({"messages": [{"role": "user", "content": "x"}], "best_of": 2}, "best_of"),
        (
            {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 21},
            "top_logprobs",
        ),
        ({"messages": [{"role": "user", "content": "x"}], "add_special_tokens": True}, "add_special_tokens"),
        ({"messages": [{"role": "user", "content": "x"}], "include_reasoning": False}, "include_reasoning"),
        ({"messages": [{"role": "user", "content": "x"}], "documents": [{"text": "y"}]}, "documents"),
        ({"messages": [{"role": "user", "content": "x"}], "chat_template": "{{x}}"}, "chat_template"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_bad_field_of_a_chat_is_named(body: dict[str, Any], param: str) -> None:
    async with opened(ScriptedBackend()) as door:
        reply = await call(door.address, "/v1/chat/completions", body)
    assert (reply.status, reply.error["param"], reply.error["code"]) == (400, param, None), reply.error


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"prompt": "x", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": "x", "add_special_tokens": False}, "add_special_tokens"),
        ("/tokenize", {"messages": [], "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": [], "chat_template": "{{x}}"}, "chat_template"),
        ("/tokenize", {"messages": [], "mm_processor_kwargs": {}}, "mm_processor_kwargs"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
    ],
)
async def test_a_bad_field_of_texts_and_tokens_is_named(path: str, body: dict[str, Any], param: str) -> None:
    async with opened(ScriptedBackend()) as door:
        reply = await call(door.address, path, body)
    assert (reply.status, reply.error["param"]) == (400, param), reply.error


@pytest.mark.parametrize(
    ("message", "param", "code"),
    [
        ("the prompt has no tokens", None, None),
        ("a chat needs at least one message", None, None),
        ("no token is left: allowed and banned ids rule out all", None, None),
        ("tools_json must be a JSON list", "tools", None),
        ("template_kwargs_json can't set this name (name=messages)", "chat_template_kwargs", None),
        ("extra_json must not hold role: it has a field", "messages", None),
        ("choices[1] must not hold a NUL character", "structured_outputs", None),
        ("stop[1]'s length is out of range (limit=1 to 256, value=0)", "stop[1]", None),
        ("number of chat messages out of range (limit=1 to 4096, value=0)", "messages", None),
        ("the chat template refused the messages (why=there is no window)", None, None),
        (
            "prompt and max_tokens don't fit the window (limit=128, value=200)",
            "prompt",
            "context_length_exceeded",
        ),
        ("the chat's text can't fit the window", None, "context_length_exceeded"),
        ("min_tokens are more than what is left of the window", "min_tokens", "context_length_exceeded"),
    ],
)
def test_what_is_wrong_is_named_only_where_it_is_a_field(
    message: str, param: str | None, code: str | None
) -> None:
    told = reply_to_error(errors.InvalidRequest(message)).content["error"]
    assert (told["param"], told["code"]) == (param, code)


@pytest.mark.parametrize(
    ("path", "body", "params"),
    [
        ("/v1/completions", {"prompt": "x"}, ("prompt", "max_tokens")),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}]},
            ("messages", "max_tokens"),
        ),
        ("/v1/responses", {"input": "x"}, ("input", "max_output_tokens")),
    ],
)
async def test_a_field_has_the_name_that_its_endpoint_gives_it(
    path: str, body: dict[str, Any], params: tuple[str, str]
) -> None:
    words = ("prompt and max_tokens don't fit the window", "max_tokens out of range")
    for words_of_one, param in zip(words, params):
        async with opened(ScriptedBackend(raising(errors.InvalidRequest(words_of_one)))) as door:
            reply = await call(door.address, path, body)
        assert (reply.status, reply.error["param"]) == (400, param)


@pytest.mark.parametrize("name", ["prompt", "messages", "max_tokens"])
async def test_what_is_no_field_of_responses_is_named_as_it_was_sent(name: str) -> None:
    body = {"input": "x", name: {"id": "p"} if name == "prompt" else 5}
    async with opened(ScriptedBackend(), unknown_fields="refuse") as door:
        reply = await call(door.address, "/v1/responses", body)
    assert (reply.status, reply.error["param"]) == (400, name)


async def test_unknown_fields_are_ignored_or_refused_by_a_setting() -> None:
    body = {"prompt": "x", "frobnicate": 1}
    async with opened(ScriptedBackend()) as door:
        assert (await call(door.address, "/v1/completions", body)).status == 200
    async with opened(ScriptedBackend(), unknown_fields="refuse") as door:
        reply = await call(door.address, "/v1/completions", body)
        assert (reply.status, reply.error["param"]) == (400, "frobnicate")
        assert (await call(door.address, "/v1/completions", {"prompt": "x"})).status == 200


async def test_who_may_not_come_in_is_told_before_the_body_is_sent() -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n"
    async with opened(ScriptedBackend(refuses=errors.Unauthenticated("no valid API key"))) as door:
        assert (await reply_to(door.address, head)).status == 401


async def test_a_body_that_is_too_large_is_refused_unread() -> None:
    async with opened(ScriptedBackend(), max_body_bytes=1 << 16) as door:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 65537\r\n\r\n"
        reply = await reply_to(door.address, head)
        assert (reply.status, reply.headers["connection"]) == (413, "close")
        chunks = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        chunks += b"10001\r\n" + b" " * 0x10001 + b"\r\n"
        assert (await reply_to(door.address, chunks)).status == 413


async def test_slow_heads_and_bodies_are_ended() -> None:
    async with opened(backend := ScriptedBackend(), stall_s=0.2) as door:
        assert (await reply_to(door.address, b"POST /v1/compl")).status == 408
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{"
        assert (await reply_to(door.address, head)).status == 408
        again = request_bytes("GET", "/version") + b"GET /ver"
        async with sending(door.address, again) as answer, asyncio.timeout(30):
            assert answer.status == 200
            assert [part async for part in answer.parts()]
            assert b" 408 " in await answer.rest()
        assert backend.num_visits == 0


@pytest.mark.parametrize("behind", [b"\x00\x01\r\n\r\n", b"GET /ver"])
async def test_no_status_stands_in_the_middle_of_an_answer(behind: bytes) -> None:
    async def holds(request: GenerateRequest) -> AsyncGenerator[Event, None]:
        yield STARTED
        yield tokens("a")
        await asyncio.Event().wait()

    raw = request_bytes("POST", "/v1/completions", b'{"prompt": "x", "stream": true}')
    async with (
        asyncio.timeout(30),
        opened(backend := ScriptedBackend(holds), stall_s=0.3) as door,
        sending(door.address, raw) as answer,
    ):
        begun = await anext(answer.parts())
        answer.writer.write(behind)
        assert begun.startswith(b"data: ") and b"HTTP/1.1" not in await answer.rest()
        await backend.closed.wait()


@pytest.mark.parametrize(("raw", "status"), [(b"\x00\x01\r\n\r\n", 400), (b"GET /ver", 408)])
async def test_what_is_no_request_is_told_so_in_the_same_form(raw: bytes, status: int) -> None:
    async with opened(ScriptedBackend(), stall_s=0.2) as door:
        reply = await reply_to(door.address, raw)
    assert (reply.status, reply.error["type"]) == (status, "invalid_request_error")


async def test_a_head_that_does_not_end_is_refused() -> None:
    async with opened(ScriptedBackend()) as door:
        raw = b"GET /version HTTP/1.1\r\nX: " + b"x" * (1 << 20)
        assert (await reply_to(door.address, raw)).status == 431


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"\x00\x01\x02\r\n\r\n", 400),
        (request_bytes("GET", "/nowhere"), 404),
        (request_bytes("GET", "/v1/completions"), 405),
        (request_bytes("POST", "/v1/completions", b"{"), 400),
        (request_bytes("POST", "/v1/completions", b"[" * 50_000), 400),
        (request_bytes("POST", "/v1/completions", b'{"prompt": "\xff"}'), 400),
        (request_bytes("POST", "/v1/completions", b'{"prompt": "\\ud800"}'), 400),
        (request_bytes("POST", "/v1/completions", b'{"prompt": "x", "temperature": NaN}'), 400),
        (request_bytes("POST", "/v1/completions", b'{"prompt": "x", "prompt": "y"}'), 200),
        (request_bytes("POST", "/v1/completions", b'{"prompt": "x", "x": ' + b"[" * 9000 + b"}"), 400),
    ],
)
async def test_whatever_comes_has_a_status(raw: bytes, status: int) -> None:
    async with opened(ScriptedBackend()) as door:
        assert (await reply_to(door.address, raw)).status == status


async def test_health_tells_why_it_is_not() -> None:
    async with opened(ScriptedBackend(reasons=("draining",))) as door:
        reply = await call(door.address, "/health")
        assert (reply.status, reply.body) == (503, b"draining\n")
        assert b"pdserve_http_requests" in (await call(door.address, "/metrics")).body
        assert (await call(door.address, "/v1/models/other")).status == 404


async def test_a_trace_that_cannot_go_on_is_left_out_and_a_key_goes_on_as_it_came() -> None:
    head = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n"
    raw = head + b"Authorization: Bearer \xe9\r\nTraceparent: %s\r\nTracestate: %s\r\n\r\n"
    async with opened(backend := ScriptedBackend()) as door:
        for trace, state in ((b"00-\xe9", b"x" * 9000), (b"00-ab", b"a=b")):
            assert (await reply_to(door.address, raw % (trace, state))).status == 200
    key = ("authorization", "Bearer \xe9")
    assert backend.calls[0].metadata == (key,)
    assert backend.calls[1].metadata == (key, ("traceparent", "00-ab"), ("tracestate", "a=b"))
