"""Requests and events as messages: what is sent is what arrives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.request import (
    Chat,
    ChatMessage,
    Event,
    Finished,
    GenerateRequest,
    Limits,
    Prompt,
    Resume,
    ResumeChoice,
    Started,
    Timings,
    Tokens,
    Usage,
    event_from_proto,
    event_to_proto,
)
from pdserve.response import Energy
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.sampling import FinishReason, SamplingParams, TokenLogprobs
from pdserve.structure import Structure
from tests.unit.service.request_messages import checked, message, resume, sampling


def test_what_is_left_out_gets_its_default() -> None:
    request = checked(message())
    assert request == GenerateRequest(input="hi")
    assert request.sampling == SamplingParams()
    assert (request.seed, request.n) == (None, 1)


texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)


ids = st.lists(st.integers(0, 99), min_size=1, max_size=5).map(tuple)


chats = st.builds(
    Chat,
    st.lists(
        st.builds(
            ChatMessage,
            st.sampled_from(["system", "user", "tool"]),
            texts,
            st.sampled_from(["", "{}", '{"tool_call_id": "c1"}']),
        ),
        min_size=1,
    ).map(tuple),
    st.sampled_from(["", "[]", '[{"name": "f"}]']),
    add_generation_prompt=st.sampled_from([None, False, True]),
)


params = st.builds(
    SamplingParams,
    temperature=st.floats(0, 10, width=32),
    top_k=st.integers(0, 100),
    top_p=st.floats(0.125, 1, width=32),
    min_p=st.floats(0, 1, width=32),
    typical_p=st.floats(0.125, 1, width=32),
    repetition_penalty=st.floats(0.125, 10, width=32),
    presence_penalty=st.floats(-2, 2, width=32),
    frequency_penalty=st.floats(-2, 2, width=32),
    logit_bias=st.dictionaries(st.integers(0, 99), st.floats(-100, 100, width=32), max_size=3).map(
        lambda biases: tuple(sorted(biases.items()))
    ),
    allowed_token_ids=st.lists(st.integers(0, 49), max_size=3).map(tuple),
    banned_token_ids=st.lists(st.integers(50, 99), max_size=3).map(tuple),
    bad_words=st.lists(texts.map(lambda text: text + "x"), max_size=2).map(tuple),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
    min_tokens=st.integers(0, 5),
    max_tokens=st.none() | st.integers(5, 100),
    stop=st.lists(texts, max_size=3).map(tuple),
    include_stop=st.booleans(),
    keep_special_tokens=st.booleans(),
    stop_token_ids=st.lists(st.integers(0, 99), max_size=3).map(tuple),
    ignore_eos=st.booleans(),
    structure=st.one_of(
        st.none(),
        st.just(Structure.json_object()),
        st.builds(Structure.regex, texts.map(lambda text: text + "x")),
        st.builds(
            Structure.choices,
            st.lists(texts.map(lambda text: text.replace("\0", "") + "x"), min_size=1, max_size=3),
        ),
    ),
)


choices = st.builds(ResumeChoice, ids, st.none() | st.sampled_from(FinishReason))


@st.composite
def requests(draw: st.DrawFn) -> GenerateRequest:
    n = draw(st.integers(1, 4))
    seed = draw(st.none() | st.integers(1, 2**64 - 1))
    held = draw(st.none() | st.lists(choices, min_size=n, max_size=n)) if seed is not None else None
    return GenerateRequest(
        input=draw(texts | chats | ids),
        request_id=draw(st.text("aZ0._:-", max_size=64)),
        model=draw(st.text(max_size=4)),
        sampling=draw(params),
        seed=seed,
        n=n,
        best_of=draw(st.none() | st.just(n)),
        echo=draw(st.booleans()),
        truncate_prompt_tokens=draw(st.none() | st.integers(1, 2**32 - 1)),
        priority=draw(st.integers(-1000, 1000)),
        user=draw(st.text(max_size=4)),
        resume=Resume(seed, tuple(held)) if held is not None and seed is not None else None,
        cache_salt=draw(st.text(max_size=4)),
    )


@given(requests())
def test_a_valid_request_survives_the_wire(request: GenerateRequest) -> None:
    octets = request.to_proto().SerializeToString()
    back = checked(pb.GenerateRequest.FromString(octets), Limits(vocab_size=100, window_tokens=1000))
    kept = request.truncate_prompt_tokens
    if isinstance(request.input, tuple) and kept is not None:
        request = replace(request, input=request.input[-kept:])
    assert back == request


def test_an_echo_has_the_logprobs_that_its_tokens_have() -> None:
    def asked(**fields: Any) -> int | None:
        return checked(sampling(**fields)).prompt_logprobs

    assert asked(echo=True, logprobs=3) == 3
    assert asked(echo=True, logprobs=3, prompt_logprobs=0) == 0
    assert asked(logprobs=3) is None
    assert asked(echo=True) is None


def test_missing_resume_choices_are_empty_ones() -> None:
    request = checked(resume(7, [1, 2], sampling=pb.SamplingParams(n=3)))
    assert request.resume is not None
    assert [request.resume.choice(n) for n in range(3)] == [
        ResumeChoice((1, 2)),
        ResumeChoice(),
        ResumeChoice(),
    ]


EVENTS: list[Event] = [
    Started(
        request_id="r",
        seed=2**63,
        num_prompt_tokens=2,
        num_cached_tokens=1,
        prompt_token_ids=(5, 6),
        model="m",
    ),
    Prompt(first_index=0, token_ids=(5, 6), text="hi", logprobs=(TokenLogprobs(-0.5, ((6, -0.5),)),)),
    Tokens(choice=1, first_index=3, token_ids=(7, 8), text="ab"),
    Tokens(
        choice=0,
        first_index=0,
        token_ids=(7,),
        text="a",
        logprobs=(TokenLogprobs(-1.5, ((9, -0.25), (7, -1.5))),),
    ),
    Finished(
        choice=1,
        reason=FinishReason.STOP_TEXT,
        usage=Usage(num_prompt_tokens=2, num_cached_tokens=1, num_completion_tokens=5),
        timings=Timings(ttft_ms=1.5, total_ms=20.0),
        num_attempts=2,
        prefill_worker="p",
        decode_worker="d",
        kv_bytes=1 << 40,
        transport="stream",
        energy=Energy(prefill_j=0.0),
    ),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_events_survive_the_wire(event: Event) -> None:
    octets = event_to_proto(event).SerializeToString()
    assert event_from_proto(pb.GenerateResponse.FromString(octets)) == event


def test_unknown_energy_is_absent_not_zero() -> None:
    energy = event_to_proto(EVENTS[-1]).finished.energy
    assert energy.HasField("prefill_j") and not energy.HasField("decode_j")


def test_an_event_of_a_later_version_is_none() -> None:
    assert event_from_proto(pb.GenerateResponse()) is None
