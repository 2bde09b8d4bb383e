"""Cheap requests that cost much if nobody looks at their size first; each is one line."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from pdserve.rpc.v1 import inference_pb2 as pb

WINDOW_TOKENS = 8_192  # of the fake engine
LONGEST_TOKEN_BYTES = 7  # of the fake engine's vocabulary: <|eos|>
FITS = WINDOW_TOKENS * LONGEST_TOKEN_BYTES  # bytes of a text that are read
MIB = 1 << 20
MOST = 4 * MIB - 200  # bytes in one field of a message that is read at all

_INFERENCE = "/pdserve.rpc.v1.Inference/"
_HEALTH = "/grpc.health.v1.Health/Check"
_REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
_SESSION = "/pdserve.rpc.v1.Workers/Session"
_UNUSED = b"\xf8\x07\x01"  # a field that nobody knows

OK = grpc.StatusCode.OK
INVALID = grpc.StatusCode.INVALID_ARGUMENT
NOT_FOUND = grpc.StatusCode.NOT_FOUND
OTHER_ADDRESS = grpc.StatusCode.FAILED_PRECONDITION
LIBRARY = grpc.StatusCode.RESOURCE_EXHAUSTED  # of what isn't even taken in

Send = Callable[[grpc.aio.Channel], Awaitable[grpc.StatusCode]]
Prepare = Callable[[], Send]


@dataclass(frozen=True, slots=True)
class Attack:
    """prepare: makes the message, which may take long. at_once: so many of it together. ends: how each may end."""

    name: str
    prepare: Prepare
    ends: tuple[grpc.StatusCode, ...]
    at_once: int = 1


def raw(method: str, content: Callable[[], bytes]) -> Prepare:
    """One call with a message of these bytes."""

    def prepare() -> Send:
        message = content()

        async def send(channel: grpc.aio.Channel) -> grpc.StatusCode:
            call: Any = channel.unary_stream(method, None, None)(message, timeout=120)
            try:
                async for _ in call:
                    pass
            except grpc.aio.AioRpcError as error:
                return error.code()
            return OK

        return send

    return prepare


def generate(make: Callable[[], pb.GenerateRequest]) -> Prepare:
    """One Generate, whose stream is read to its end."""
    return raw(_INFERENCE + "Generate", lambda: make().SerializeToString())


def many(num_items: int, request: bytes = b"") -> Prepare:
    """One message with so many requests, in a call that takes them; the client listens to the end."""
    items = (
        pb.OneRequest(stream=number, begin=pb.GenerateRequest.FromString(request)).SerializeToString()
        for number in range(1, num_items + 1)
    )
    return raw(
        _INFERENCE + "GenerateMany",
        lambda: b"".join(b"\x0a" + bytes((len(each),)) + each for each in items),
    )


def text(make: Callable[[], str], keep: int | None = None, **params: Any) -> Prepare:
    return generate(
        lambda: pb.GenerateRequest(
            text=make(),
            truncate_prompt_tokens=keep,
            sampling=pb.SamplingParams(**{"max_tokens": 1, "seed": 1} | params),
        )
    )


def ids(count: int, keep: int | None = None, **params: Any) -> Prepare:
    return generate(
        lambda: pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=b"a" * count),
            truncate_prompt_tokens=keep,
            sampling=pb.SamplingParams(**{"max_tokens": 1, "seed": 1} | params),
        )
    )


def chat(
    *contents: str,
    tools: str = "",
    extra: str = "",
    variables: str = "",
    method: str = "Generate",
    keep: int | None = None,
) -> Prepare:
    """Each a message of the user's; extra: of each."""

    def make() -> bytes:
        messages = [pb.ChatMessage(role="user", content=each, extra_json=extra) for each in contents]
        said = pb.Chat(messages=messages, tools_json=tools, template_kwargs_json=variables)
        if method == "Tokenize":
            return pb.TokenizeRequest(chat=said).SerializeToString()
        params = pb.SamplingParams(max_tokens=1, seed=1)
        asked = pb.GenerateRequest(chat=said, sampling=params, truncate_prompt_tokens=keep)
        return asked.SerializeToString()

    return raw(_INFERENCE + method, make)


def params(**values: Callable[[], Any]) -> Prepare:
    """A short text with these sampling parameters."""

    def make() -> pb.GenerateRequest:
        given = {key: value() for key, value in values.items()}
        return pb.GenerateRequest(text="Once", sampling=pb.SamplingParams(**{"max_tokens": 1} | given))

    return generate(make)


def fields(**values: Callable[[], Any]) -> Prepare:
    """A short text with these fields of the request."""

    def make() -> pb.GenerateRequest:
        given = {key: value() for key, value in values.items()}
        return pb.GenerateRequest(text="Once", **{"sampling": pb.SamplingParams(max_tokens=1)} | given)

    return generate(make)


def tokenize(make: Callable[[], str]) -> Prepare:
    return raw(_INFERENCE + "Tokenize", lambda: pb.TokenizeRequest(text=make()).SerializeToString())


def detokenize(count: int) -> Prepare:
    make = lambda: pb.DetokenizeRequest(token_ids=b"a" * count).SerializeToString()  # noqa: E731
    return raw(_INFERENCE + "Detokenize", make)


def field(method: str, number: int, content: Callable[[], bytes]) -> Prepare:
    """Any call, whose message holds only this field, of these bytes."""

    def make() -> bytes:
        inner = content()
        return bytes([number << 3 | 2]) + _varint(len(inner)) + inner

    return raw(method, make)


def nested(number: int, content: Callable[[], bytes]) -> Prepare:
    return field(_INFERENCE + "Generate", number, content)


def _varint(number: int) -> bytes:
    digits = []
    while number > 127:
        digits.append(number & 127 | 128)
        number >>= 7
    return bytes([*digits, number])


def resume(num_choices: int, num_tokens: int) -> Prepare:
    held = pb.ResumeChoice(token_ids=b"a" * num_tokens)
    return fields(
        sampling=lambda: pb.SamplingParams(n=num_choices, seed=1),
        resume=lambda: pb.Resume(seed=1, choices=[held] * num_choices),
    )


def cancelled() -> Send:
    """Large texts whose client leaves as soon as they are sent."""
    message = pb.GenerateRequest(text="low tide " * (FITS // 9)).SerializeToString()

    async def send(channel: grpc.aio.Channel) -> grpc.StatusCode:
        call: Any = channel.unary_stream(_INFERENCE + "Generate", None, None)
        sent = [call(message, timeout=120) for _ in range(16)]
        await asyncio.sleep(0)
        for each in sent:
            each.cancel()
        return OK

    return send


def _json_keys(num_bytes: int) -> str:
    return json.dumps(dict.fromkeys(map(str, range(num_bytes // 13)), 1))


_INTERSECTED = "start: T\nT: " + " & ".join(f"/.*x{number}.*/" for number in range(60)) + "\n"
_PATTERNS = json.dumps({"allOf": [{"type": "string", "pattern": f".*y{number}.*"} for number in range(20)]})
_OPTIONAL = json.dumps({"type": "object", "properties": {f"p{number}": {} for number in range(1_500)}})

# fmt: off
ATTACKS = [
    # texts
    Attack("text of 60 MB", text(lambda: "low tide " * (60 * MIB // 9)), (LIBRARY,)),
    Attack("text of 5 MB", text(lambda: "low tide " * (5 * MIB // 9)), (INVALID,)),
    Attack("text of 4 MB, three at once", text(lambda: "low tide " * (MOST // 9)), (INVALID,), 3),
    Attack("text of 4 MB beyond ASCII", text(lambda: "é" * (MOST // 2)), (INVALID,)),
    Attack("text that could just fit, but doesn't", text(lambda: "low tide " * (FITS // 9)), (INVALID,), 8),
    Attack("text that is one word", text(lambda: "a" * FITS), (INVALID,)),
    Attack("text of digits", text(lambda: "7" * FITS), (INVALID,)),
    Attack("text of spaces", text(lambda: " " * FITS), (INVALID,)),
    Attack("text of special tokens", text(lambda: "<|eos|>" * WINDOW_TOKENS), (INVALID,)),
    Attack("text of 4 MB of which 5 tokens are kept", text(lambda: "low tide " * (MOST // 9), keep=5), (OK,), 3),
    Attack("word of 4 MB of which 5 tokens are kept", text(lambda: "a" * MOST, keep=5), (INVALID,)),
    Attack("text of 4 MB of which all are kept", text(lambda: "ab " * (MOST // 3), keep=(1 << 32) - 1), (INVALID,)),
    Attack("echo of a text that fills the window", text(lambda: "low tide " * (WINDOW_TOKENS // 9), echo=True), (OK,)),
    Attack("text whose client leaves", cancelled, (OK,)),
    Attack("100,000 requests in one message", many(100_000), (INVALID,)),
    Attack("256 requests in each of 20 messages", many(256), (OK,), 20),
    # chats
    Attack("chat of 60 MB", chat("low tide " * (60 * MIB // 9)), (LIBRARY,)),
    Attack("chat of one long message", chat("low tide " * (MOST // 9)), (INVALID,)),
    Attack("chat full of what special tokens begin with", chat("<" * FITS), (INVALID,)),
    Attack("chat full of special tokens", chat("<|eos|>" * (FITS // 9)), (INVALID,)),
    Attack("chat of one special token and much else", chat("<|eos|> " + "low tide " * (FITS // 10)), (INVALID,)),
    Attack("500,000 messages", nested(4, lambda: b"\x0a\x06\x0a\x01u\x12\x01a" * 500_000), (INVALID,)),
    Attack("2 million empty messages", nested(4, lambda: b"\x0a\x00" * (MOST // 2)), (INVALID,), 3),
    Attack("17,000 messages", chat(*["a"] * 17_000), (INVALID,)),
    Attack("16,384 messages", chat(*["a"] * 16_384), (INVALID,), 3),
    Attack("16,384 messages of which 5 tokens are kept", chat(*["a"] * 16_384, keep=5), (OK,), 3),
    Attack("8,192 messages", chat(*["a"] * WINDOW_TOKENS), (INVALID,), 3),
    Attack("tools of empty lists", chat("Hi", tools="[" + "[]," * (MOST // 3 - 1) + "[]]"), (INVALID,)),
    Attack("tools nested deep", chat("Hi", tools="[" * MOST), (INVALID,)),
    Attack("tools of 30,000 names", chat("Hi", tools=f"[{_json_keys(390_000)}]"), (OK,), 3),
    Attack("tools that are one text", chat("Hi", tools=json.dumps(["a" * (MOST - 99)])), (OK,)),
    Attack("tools that are one number", chat("Hi", tools=f"[{'1' * (MOST - 99)}]"), (INVALID,)),
    Attack("extra_json of 4 MB", chat("Hi", extra=_json_keys(MOST - 500_000)), (INVALID,)),
    Attack("extra_json in each of 10,000 messages", chat(*["a"] * 10_000, extra='{"a": [1, 2, {"b": 3}]}'), (INVALID,)),
    Attack("variables of 4 MB", chat("Hi", variables=_json_keys(MOST - 500_000)), (INVALID,)),
    # ids
    Attack("15 million token ids", ids(15_000_000), (LIBRARY,)),
    Attack("4 million token ids", ids(MOST), (INVALID,), 3),
    Attack("4 million token ids of which 5 are kept", ids(MOST, keep=5), (OK,)),
    Attack("2 million token ids, one by one", nested(5, lambda: b"\x08\x61" * (MOST // 2)), (INVALID,)),
    Attack("token ids that fill the window, with logprobs", ids(WINDOW_TOKENS - 1, prompt_logprobs=20), (OK,)),
    Attack("token ids for 64 choices", ids(WINDOW_TOKENS // 4, n=64, logprobs=20), (OK,)),
    # sampling
    Attack("2 million equal biases", nested(6, lambda: b"\x4a\x00" * (MOST // 2)), (INVALID,)),
    Attack("300,000 biases", params(logit_bias=lambda: dict.fromkeys(range(300_000), 1.0)), (INVALID,)),
    Attack("2 million stop strings", nested(6, lambda: b"\x62\x00" * (MOST // 2)), (INVALID,)),
    Attack("stop string of 4 MB", params(stop=lambda: ["a" * MOST]), (INVALID,)),
    Attack("100,000 bad words", params(bad_words=lambda: ["a"] * 100_000), (INVALID,)),
    Attack("the longest bad words", params(bad_words=lambda: ["ab " * 42] * 128), (OK,)),
    Attack("4 million allowed ids", params(allowed_token_ids=lambda: b"a" * MOST), (INVALID,)),
    Attack("the most banned ids", params(banned_token_ids=lambda: [7] * 16_384), (OK,)),
    Attack("a million sets of parameters", raw(_INFERENCE + "Generate", lambda: b"\x32\x00" * (MOST // 2)), (INVALID,)),
    Attack("schema of 4 MB", params(json_schema=lambda: "[" * MOST), (INVALID,)),
    Attack("regex of 4 MB", params(regex=lambda: "(" * MOST), (INVALID,)),
    Attack("a million texts to choose from", params(choices=lambda: pb.Choices(texts=["a"] * 1_000_000)), (INVALID,)),
    # structures
    Attack("grammar of 60 intersected regexes", params(grammar=lambda: _INTERSECTED), (INVALID,), 2),
    Attack("schema of 20 patterns at once", params(json_schema=lambda: _PATTERNS), (INVALID,), 2),
    Attack("schema of 1,500 optional properties", params(json_schema=lambda: _OPTIONAL), (INVALID,), 2),
    Attack("regex of repeats in repeats", params(regex=lambda: "((a{1,99}){1,99}){1,99}"), (INVALID, OK)),
    Attack("an easy structure behind these", params(regex=lambda: "[ab]{1,3}"), (OK,)),
    # names, held tokens
    Attack("id of 4 MB", fields(request_id=lambda: "a" * MOST), (INVALID,)),
    Attack("user of 4 MB", fields(user=lambda: "a" * MOST), (INVALID,)),
    Attack("model of 4 MB", fields(model=lambda: "a" * MOST), (NOT_FOUND,)),
    Attack("salt of 4 MB", fields(cache_salt=lambda: "a" * MOST), (INVALID,)),
    Attack("2 million resumed choices", nested(10, lambda: b"\x12\x00" * (MOST // 2)), (INVALID,)),
    Attack("64 resumed choices of 8,000 tokens", resume(64, 8_000), (OK, INVALID)),
    # the other calls
    Attack("Tokenize 4 MB", tokenize(lambda: "low tide " * (MOST // 9)), (INVALID,)),
    Attack("Tokenize what could fit", tokenize(lambda: "low tide " * (FITS // 9)), (OK,), 8),
    Attack("Tokenize 16,384 messages", chat(*["a"] * 16_384, method="Tokenize"), (INVALID,), 3),
    Attack("Tokenize 8,192 messages", chat(*["a"] * WINDOW_TOKENS, method="Tokenize"), (INVALID,), 3),
    Attack("Detokenize 15 million ids", detokenize(15_000_000), (LIBRARY,)),
    Attack("Detokenize 4 million ids", detokenize(MOST), (INVALID,), 3),
    Attack("Detokenize a window", detokenize(WINDOW_TOKENS), (OK,), 8),
    Attack("Abort by an id of 4 MB", field(_INFERENCE + "Abort", 1, lambda: b"a" * MOST), (NOT_FOUND,)),
    Attack("GetStatus, 200 times, with reasons", raw(_INFERENCE + "GetStatus", lambda: b"\x08\x01"), (OK,), 200),
    Attack("health of a name of 4 MB", field(_HEALTH, 1, lambda: b"a" * MOST), (NOT_FOUND,)),
    Attack("reflection of a name of 4 MB", field(_REFLECTION, 4, lambda: b"a" * MOST), (OK,)),
    Attack("a worker's session at the clients' address", field(_SESSION, 1, lambda: b"a" * MOST), (OTHER_ADDRESS,)),
    # what is no message
    Attack("4 MB of nothing", raw(_INFERENCE + "Generate", lambda: b"\xff" * MOST), (INVALID,)),
    Attack("a million unknown fields", raw(_INFERENCE + "Generate", lambda: _UNUSED * (MOST // 3)), (INVALID,)),
    Attack("groups in groups", raw(_INFERENCE + "Generate", lambda: b"\xfb\x07" * (MOST // 2)), (INVALID,)),
]
# fmt: on
