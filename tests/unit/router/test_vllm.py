"""vLLM's requests as ours, and our events as vLLM's answers."""

from __future__ import annotations

import pytest

from pdserve.errors import InvalidRequest
from pdserve.request import Finished, GenerateRequest, Limits, Prompt, Started, Timings, Tokens, Usage
from pdserve.rpc.v1 import vllm_engine_pb2 as pb
from pdserve.sampling import FinishReason, SamplingParams, TokenLogprobs
from pdserve.structure import Structure, StructureKind
from router.vllm_answer import VllmAnswer
from router.vllm_request import request_from

LIMITS = Limits(vocab_size=1_000, window_tokens=100)


def read(**fields: object) -> GenerateRequest:
    """With a prompt of three tokens and these parameters."""
    return request_from(
        pb.GenerateRequest(
            tokenized=pb.TokenizedInput(original_text="no", input_ids=[1, 2, 3]),
            sampling_params=pb.SamplingParams(**fields),  # type: ignore[arg-type]
        ),
        LIMITS,
    )


def test_what_is_not_set_is_vllms_default() -> None:
    assert read() == GenerateRequest(input=(1, 2, 3))
    assert read(top_p=0.0, repetition_penalty=0.0, n=0, temperature=1.0) == read()


def test_every_parameter_has_its_meaning() -> None:
    request = read(
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        min_p=0.125,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        repetition_penalty=1.5,
        max_tokens=9,
        min_tokens=2,
        stop=["a", "b"],
        stop_token_ids=[4],
        ignore_eos=True,
        n=2,
        logprobs=3,
        prompt_logprobs=0,
        seed=11,
        include_stop_str_in_output=True,
        logit_bias={5: 1.0, 4: -1.0},
        truncate_prompt_tokens=2,
        skip_special_tokens=True,
    )
    assert request == GenerateRequest(
        input=(2, 3),
        seed=11,
        n=2,
        truncate_prompt_tokens=2,
        sampling=SamplingParams(
            temperature=0.5,
            top_p=0.25,
            top_k=7,
            min_p=0.125,
            frequency_penalty=0.5,
            presence_penalty=-0.5,
            repetition_penalty=1.5,
            max_tokens=9,
            min_tokens=2,
            stop=("a", "b"),
            stop_token_ids=(4,),
            ignore_eos=True,
            logprobs=3,
            prompt_logprobs=0,
            include_stop=True,
            logit_bias=((4, -1.0), (5, 1.0)),
        ),
    )


@pytest.mark.parametrize(("seed", "ours"), [(-1, None), (0, 0), (-2, (1 << 64) - 2)])
def test_seeds(seed: int, ours: int | None) -> None:
    assert read(seed=seed).seed == ours


def test_a_prompt_cut_to_the_window_leaves_room_for_the_answer() -> None:
    ids = list(range(1, 151))
    params = pb.SamplingParams(truncate_prompt_tokens=-1, max_tokens=30)
    long = pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=ids), sampling_params=params)
    assert request_from(long, LIMITS).input == tuple(ids[-70:])
    assert request_from(long, Limits(vocab_size=1_000)).truncate_prompt_tokens is None, "not known yet"


@pytest.mark.parametrize("keep", [0, -2])
def test_a_prompt_cannot_be_cut_to_nothing(keep: int) -> None:
    with pytest.raises(InvalidRequest, match="truncate_prompt_tokens out of range"):
        read(truncate_prompt_tokens=keep)


@pytest.mark.parametrize(
    ("fields", "kind", "texts"),
    [
        ({"json_schema": "{}"}, StructureKind.JSON_SCHEMA, ("{}",)),
        ({"regex": "a+"}, StructureKind.REGEX, ("a+",)),
        ({"grammar": "start: A"}, StructureKind.GRAMMAR, ("start: A",)),
        ({"json_object": True}, StructureKind.JSON_OBJECT, ()),
        ({"choice": pb.ChoiceConstraint(choices=["x", "y"])}, StructureKind.CHOICES, ("x", "y")),
    ],
)
def test_structures(fields: dict[str, object], kind: StructureKind, texts: tuple[str, ...]) -> None:
    assert read(**fields).sampling.structure == Structure(kind, texts)


def test_no_json_object_is_no_structure() -> None:
    assert read(json_object=False).sampling.structure is None


# --- answers

STARTED = Started(
    request_id="r", seed=1, num_prompt_tokens=3, num_cached_tokens=2, prompt_token_ids=(1, 2, 3), model="m"
)


def tokens(choice: int, first_index: int, *token_ids: int) -> Tokens:
    scores = tuple(TokenLogprobs(-float(each), ((each, -float(each)),)) for each in token_ids)
    return Tokens(choice=choice, first_index=first_index, token_ids=token_ids, text="x", logprobs=scores)


def finished(choice: int, reason: FinishReason) -> Finished:
    usage = Usage(num_prompt_tokens=3, num_cached_tokens=2, num_completion_tokens=3)
    return Finished(choice=choice, reason=reason, usage=usage, timings=Timings(), num_attempts=1)


def test_chunks_are_what_is_new_and_the_prompts_scores_come_once_a_choice() -> None:
    answer = VllmAnswer(streams=True, stop=())
    prompt = Prompt(first_index=0, token_ids=(1, 2, 3), logprobs=(TokenLogprobs(-2.0), TokenLogprobs(-3.0)))
    assert answer.take(STARTED) == answer.take(prompt) == []
    chunks = [answer.take(each)[0].chunk for each in (tokens(0, 0, 7), tokens(1, 0, 8), tokens(0, 1, 9, 10))]
    assert [(chunk.index, list(chunk.token_ids), chunk.completion_tokens) for chunk in chunks] == [
        (0, [7], 1), (1, [8], 1), (0, [9, 10], 2),
    ]  # fmt: skip
    assert all((chunk.prompt_tokens, chunk.cached_tokens) == (3, 2) for chunk in chunks)
    assert [chunk.HasField("input_logprobs") for chunk in chunks] == [True, True, False]
    scores = chunks[0].input_logprobs
    assert [each.HasField("value") for each in scores.token_logprobs] == [False, True, True]
    assert [each.value for each in scores.token_logprobs[1:]] == [-2.0, -3.0]
    assert list(chunks[2].output_logprobs.token_logprobs) == [-9.0, -10.0]
    complete = answer.take(finished(0, FinishReason.LENGTH))[0].complete
    assert (list(complete.output_ids), complete.finish_reason) == ([9, 10], "length")


def test_without_a_stream_the_end_has_it_all() -> None:
    answer = VllmAnswer(streams=False, stop=("END",))
    for event in (STARTED, tokens(1, 0, 8), tokens(0, 0, 7), tokens(0, 1, 9, 10)):
        assert answer.take(event) == []
    first, second = (
        answer.take(finished(choice, reason))[0].complete
        for choice, reason in ((0, FinishReason.STOP_TOKEN), (1, FinishReason.STOP_TEXT))
    )
    assert (list(first.output_ids), first.completion_tokens, first.matched_token_id) == ([7, 9, 10], 3, 10)
    assert [list(top.token_ids) for top in first.output_logprobs.top_logprobs] == [[7], [9], [10]]
    assert (second.index, second.finish_reason, second.matched_stop_str) == (1, "stop", "END")


def test_an_answer_without_tokens_ends_too() -> None:
    answer = VllmAnswer(streams=True, stop=("a", "b"))
    answer.take(STARTED)
    complete = answer.take(finished(0, FinishReason.STOP_TEXT))[0].complete
    assert not complete.output_ids and complete.WhichOneof("matched_stop") is None
    assert not complete.HasField("output_logprobs") and not complete.HasField("input_logprobs")
