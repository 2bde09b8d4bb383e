"""What a request may say, and what the rest is answered: field, limit, value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdserve.errors import InvalidRequest
from pdserve.request import (
    Chat,
    ChatMessage,
    GenerateRequest,
    Limits,
    Resume,
    ResumeChoice,
)
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.sampling import SamplingParams
from pdserve.structure import Structure, StructureKind
from tests.unit.service.request_messages import chat, checked, message, resume, said_with, sampling

BAD: list[tuple[pb.GenerateRequest, str]] = [
    (pb.GenerateRequest(), "exactly one of text, chat, token_ids"),
    (message(text=""), "text must not be empty"),
    (pb.GenerateRequest(token_ids=pb.TokenIds()), "token_ids must not be empty"),
    (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 100])), "token_ids .*limit=99, value=100"),
    (message(request_id="a b"), "request_id must be"),
    (message(request_id="x" * 65), "request_id must be"),
    (message(priority=1001), "priority out of range .*±1000, value=1001"),
    (message(user="u" * 129), "user's length is out of range .*limit=0 to 128, value=129"),
    (message(cache_salt="u" * 129), "cache_salt's length is out of range"),
    (
        message(truncate_prompt_tokens=0),
        r"truncate_prompt_tokens out of range .*limit=1 to 2\^32 - 1, value=0",
    ),
    (chat(), r"number of chat messages out of range .*limit=1 to 16384, value=0"),
    (chat(("robot", "hi")), "unknown chat role .*role=robot"),
    (
        chat(("user", "hi"), continue_final_message=True),
        "continue_final_message needs a last message of the assistant",
    ),
    (chat(("user", "hi"), tools_json="{}"), "JSON list"),
    (chat(("user", "hi"), tools_json="[" * 60_000), "JSON list"),
    (
        chat(("user", "hi"), tools_json="[]," * 33_000),
        r"the chat's JSON fields hold too much .*65536 .*value=66000",
    ),
    (said_with("[]"), "extra_json must be a JSON object .*message_index=1, value=\\[\\]"),
    (said_with("{"), "extra_json must be a JSON object"),
    (said_with('{"content": "x"}'), "extra_json must not hold content"),
    (said_with('{"content": null}'), "extra_json must not hold content"),
    (said_with('{"role": "x"}'), "extra_json must not hold role"),
    (
        chat(("assistant", "a"), continue_final_message=True, add_generation_prompt=True),
        "continue_final_message and add_generation_prompt exclude each other",
    ),
    (sampling(temperature=-0.5), "temperature .*value=-0.5"),
    (sampling(temperature=float("nan")), "temperature"),
    (sampling(temperature=float("inf")), "temperature"),
    (sampling(top_p=0.0), "top_p .*value=0"),
    (sampling(top_p=1.5), "top_p .*value=1.5"),
    (sampling(top_p=float("nan")), "top_p"),
    (sampling(max_tokens=0, min_tokens=1), "min_tokens must not exceed max_tokens .*limit=0, value=1"),
    (sampling(max_tokens=3, min_tokens=4), "min_tokens .*limit=3, value=4"),
    (sampling(stop=["x"] * 17), "stop has too many entries .*limit=16, value=17"),
    (sampling(stop=[""]), r"stop\[0\]'s length .*value=0"),
    (sampling(stop=["x" * 257]), r"stop\[0\]'s length .*limit=1 to 256, value=257"),
    (sampling(stop_token_ids=[1] * 129), "stop_token_ids has too many entries .*limit=128, value=129"),
    (sampling(stop_token_ids=[100]), "stop_token_ids .*limit=99"),
    (sampling(top_p=-0.1), r"top_p .*value=-0\.1\)"),
    (sampling(top_p=1.1), r"top_p .*value=1\.1\)"),
    (sampling(min_p=-0.25), "min_p out of range .*limit=0 to 1, value=-0.25"),
    (sampling(min_p=1.25), "min_p out of range"),
    (sampling(min_p=float("nan")), "min_p out of range"),
    (sampling(typical_p=0.0), "typical_p out of range .*limit=above 0, at most 1, value=0"),
    (sampling(typical_p=1.5), "typical_p .*value=1.5"),
    (sampling(repetition_penalty=0.0), "repetition_penalty out of range .*limit=above 0, finite, value=0"),
    (sampling(repetition_penalty=float("inf")), "repetition_penalty .*value=inf"),
    (sampling(presence_penalty=2.5), "presence_penalty out of range .*limit=±2, value=2.5"),
    (sampling(presence_penalty=float("nan")), "presence_penalty out of range"),
    (sampling(frequency_penalty=-3.0), "frequency_penalty out of range .*limit=±2, value=-3"),
    (sampling(logit_bias={7: 101.0}), r"logit_bias\[7\] out of range .*limit=±100, value=101"),
    (sampling(logit_bias={7: float("nan")}), r"logit_bias\[7\] out of range"),
    (
        sampling(logit_bias=dict.fromkeys(range(1025), 1.0)),
        "logit_bias has too many entries .*limit=1024, value=1025",
    ),
    (sampling(allowed_token_ids=[100]), "allowed_token_ids .*limit=99, value=100"),
    (sampling(banned_token_ids=[100]), "banned_token_ids .*limit=99, value=100"),
    (
        sampling(allowed_token_ids=[1] * 16385),
        "allowed_token_ids has too many entries .*limit=16384, value=16385",
    ),
    (sampling(banned_token_ids=[1] * 16385), "banned_token_ids has too many entries"),
    (sampling(allowed_token_ids=[1, 2], banned_token_ids=[2, 1]), "banned_token_ids rule out all"),
    (sampling(bad_words=[" "]), r"bad_words\[0\] must not be blank"),
    (sampling(bad_words=["x" * 129]), r"bad_words\[0\]'s length .*value=129"),
    (sampling(bad_words=["x"] * 129), "bad_words has too many entries .*limit=128, value=129"),
    (sampling(logprobs=21), "^logprobs out of range .*limit=0 to 20, value=21"),
    (sampling(prompt_logprobs=21), "^prompt_logprobs out of range .*limit=0 to 20, value=21"),
    (sampling(n=2, best_of=1), "best_of must not be below n .*limit=2, value=1"),
    (sampling(n=2, best_of=65), "best_of out of range .*limit=1 to 64, value=65"),
    (sampling(n=2, best_of=3, temperature=0), "best_of above n needs a temperature .*limit=2, value=3"),
    (resume(7, [1], [], sampling=pb.SamplingParams(n=2, best_of=3)), "best_of above n .*limit=2, value=3"),
    (sampling(n=0), "n out of range"),
    (sampling(n=65), "n out of range .*limit=1 to 64, value=65"),
    (resume(0, [1]), "resume needs the seed"),
    (resume(7, [1], sampling=pb.SamplingParams(seed=8)), "seed is not the one in sampling"),
    (resume(7, [1], [1]), "more choices than the request .*limit=1, value=2"),
    (
        resume(7, [1, 2], sampling=pb.SamplingParams(max_tokens=1)),
        "more tokens than the request may have .*limit=1, value=2",
    ),
    (resume(7, [100]), "resume.token_ids .*limit=99"),
    (
        message(
            resume=pb.Resume(seed=7, choices=[pb.ResumeChoice(finish_reason=pb.FINISH_REASON_UNSPECIFIED)])
        ),
        "finish_reason",
    ),
]


@pytest.mark.parametrize(("msg", "said"), BAD, ids=[f"{n}-{said}" for n, (_, said) in enumerate(BAD)])
def test_bad_requests_are_refused_by_name(msg: pb.GenerateRequest, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        checked(msg, Limits(vocab_size=100, window_tokens=50))


@pytest.mark.parametrize(
    ("msg", "said"),
    [
        (sampling(stop=["x"] * 17), "stop has too many entries"),
        (sampling(allowed_token_ids=[1] * 16385), "allowed_token_ids has too many entries"),
        (sampling(logit_bias=dict.fromkeys(range(1025), 1.0)), "logit_bias has too many entries"),
        (sampling(choices=pb.Choices(texts=["a"] * 1025)), "choices has too many entries"),
        (
            pb.GenerateRequest(
                chat=pb.Chat(messages=[pb.ChatMessage()] * 16385),
                sampling=pb.SamplingParams(),
                truncate_prompt_tokens=1,
            ),
            "number of chat messages",
        ),
        (
            pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage()] * 51)),
            "more chat messages than the window .*limit=50, value=51",
        ),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * 50)), "limit=50, value=51, num_prompt_tokens=50"),
        (resume(7, [1] * 51), "more tokens than the request may have .*limit=50, value=51"),
        (resume(7, *[[1]] * 65, sampling=pb.SamplingParams(n=10**6)), "more choices .*limit=64, value=65"),
    ],
    ids=range(9),
)
def test_lists_that_are_too_long_are_refused_before_they_are_read(msg: pb.GenerateRequest, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        GenerateRequest.from_proto(msg, Limits(window_tokens=50))


def test_a_long_prompt_of_which_little_is_kept_is_none() -> None:
    msg = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * 500), truncate_prompt_tokens=7)
    assert checked(msg, Limits(window_tokens=50)).input == (1,) * 7
    msg.truncate_prompt_tokens = 50
    with pytest.raises(InvalidRequest, match=r"fit the window .*value=51, num_prompt_tokens=50"):
        checked(msg, Limits(window_tokens=50))


def asks(**fields: Any) -> GenerateRequest:
    return GenerateRequest(input="x", sampling=SamplingParams(**fields))


# What only a client in Python, or JSON, can say.
UNTYPED: list[tuple[GenerateRequest, str]] = [
    (asks(stop="abc"), r"stop must be a list \(value='abc'\)"),
    (asks(stop=("a", 1)), r"stop\[1\] must be a text \(value=1\)"),
    (asks(temperature="hot"), r"temperature must be a number \(value='hot'\)"),
    (asks(temperature=1e39), "temperature out of range .*limit=at least 0, finite"),
    (asks(top_k=True), r"top_k must be a whole number \(value=True\)"),
    (asks(top_k=1.5), r"top_k must be a whole number \(value=1.5\)"),
    (asks(ignore_eos=1), r"ignore_eos must be true or false \(value=1\)"),
    (asks(top_k=-1), r"top_k out of range \(limit=0 to 2\^32 - 1, value=-1\)"),
    (asks(stop=("\ud800",)), r"stop\[0\] can't be encoded as UTF-8"),
    (asks(structure=Structure.regex("\ud800")), "regex can't be encoded as UTF-8"),
    (asks(logit_bias=((-1, 2.0),)), "logit_bias holds an id outside the vocabulary .*value=-1"),
    (GenerateRequest(input="\ud800"), "text can't be encoded as UTF-8"),
    (GenerateRequest(input=[1, 2]), "input must be a text, a Chat or a tuple of token ids"),  # type: ignore[arg-type]
    (GenerateRequest(input=(1, -2)), "token_ids holds an id outside the vocabulary .*value=-2"),
    (GenerateRequest(input=(1 << 32,)), "token_ids holds an id outside the vocabulary .*limit=4294967295"),
    (
        GenerateRequest(input=Chat((ChatMessage("user", "\ud800"),))),
        r"messages\[0\].content can't be encoded",
    ),
    (GenerateRequest(input=Chat((ChatMessage("user", "x"),), '["\ud800"]')), "tools_json can't be encoded"),
    (GenerateRequest(input="x", user="\ud800"), "user can't be encoded"),
    (GenerateRequest(input="x", model="\ud800"), "model can't be encoded"),
    (GenerateRequest(input="x", n=-1), "n out of range .*limit=1 to 64, value=-1"),
    (GenerateRequest(input="x", priority=1 << 31), "priority out of range .*limit=±1000"),
    (GenerateRequest(input="x", truncate_prompt_tokens=-1), "truncate_prompt_tokens out of range .*value=-1"),
    (GenerateRequest(input="x", resume=Resume(1, (ResumeChoice((-1,)),))), "resume.token_ids holds an id"),
    (GenerateRequest(input="x", resume=Resume(-1, ())), r"resume.seed out of range .*value=-1"),
    (GenerateRequest(input="x", seed=1 << 64), r"seed out of range \(limit=0 to 2\^64 - 1"),
]


@pytest.mark.parametrize(("asked", "said"), UNTYPED, ids=range(len(UNTYPED)))
def test_what_no_message_could_carry_is_refused_by_the_same_check(asked: GenerateRequest, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        asked.check(Limits())


def test_numbers_of_other_libraries_are_numbers() -> None:
    asks(temperature=np.float32(0.5), top_k=np.int64(3), top_p=1, stop=["a"]).check(Limits())


STRUCTURES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "json_schema": ("{}", ("{}",)),
    "json_object": (True, ()),
    "regex": ("a+", ("a+",)),
    "grammar": ("root ::= 'a'", ("root ::= 'a'",)),
    "choices": (pb.Choices(texts=["a", "b"]), ("a", "b")),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_structure_comes_through_both_ways(name: str) -> None:
    value, texts = STRUCTURES[name]
    request = checked(sampling(**{name: value}))
    assert request.sampling.structure == Structure(StructureKind(name), texts)
    assert checked(request.to_proto()) == request


def test_no_json_object_is_no_structure() -> None:
    assert checked(sampling(json_object=False)).sampling.structure is None


BAD_STRUCTURES: list[tuple[dict[str, Any], str]] = [
    ({"json_schema": " "}, "json_schema must not be empty"),
    ({"regex": ""}, "regex must not be empty"),
    ({"grammar": "\n"}, "grammar must not be empty"),
    ({"regex": "a" * 65_537}, r"regex is too large \(limit=65536 bytes, value=65537\)"),
    ({"choices": pb.Choices()}, "choices must not be empty"),
    ({"choices": pb.Choices(texts=["a"] * 1025)}, "value=1025"),
    (
        {"choices": pb.Choices(texts=["a", ""])},
        r"choices\[1\]\'s length is out of range \(limit=1 to 1024, value=0\)",
    ),
    ({"choices": pb.Choices(texts=["a" * 1025])}, r"choices\[0\]\'s length .*value=1025"),
    (
        {"choices": pb.Choices(texts=["a" * 1000] * 70)},
        r"choices is too large \(limit=65536 bytes, value=70000\)",
    ),
    ({"choices": pb.Choices(texts=["a\0"])}, r"choices\[0\] must not hold a NUL character"),
]


@pytest.mark.parametrize(("fields", "said"), BAD_STRUCTURES, ids=range(len(BAD_STRUCTURES)))
def test_bad_structures_are_refused_by_name(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        checked(sampling(**fields))


def test_every_sampling_field_is_taken() -> None:
    taken = set(SamplingParams.__dataclass_fields__) - {"structure"} | {"seed", "n", "best_of", "echo"}
    assert taken | set(STRUCTURES) == {field.name for field in pb.SamplingParams.DESCRIPTOR.fields}


def test_every_sampling_field_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs/sampling.md").read_text()
    missing = [field.name for field in pb.SamplingParams.DESCRIPTOR.fields if f"`{field.name}`" not in page]
    assert missing == []
