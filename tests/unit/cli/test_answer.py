"""What `pdserve generate` shows and prints of a stream."""

from __future__ import annotations

import pytest

from pdserve.cli.answer import Answer
from pdserve.errors import InvariantViolated
from pdserve.response import Energy, Event, Finished, Prompt, Started, Timings, Tokens, Usage
from pdserve.sampling import FinishReason, TokenLogprobs

STARTED = Started(
    request_id="r", seed=7, num_prompt_tokens=2, num_cached_tokens=0, prompt_token_ids=(5, 6), model="m"
)


def tokens(choice: int, first: int, *texts: str, logprobs: bool = False) -> Tokens:
    given = tuple(TokenLogprobs(-1.5, ((9, -0.5),)) for _ in texts) if logprobs else ()
    ids = tuple(range(first, first + len(texts)))
    return Tokens(choice=choice, first_index=first, token_ids=ids, text="".join(texts), logprobs=given)


def finished(choice: int, energy: Energy | None = None) -> Finished:
    return Finished(
        choice=choice,
        reason=FinishReason.EOS,
        usage=Usage(num_prompt_tokens=2, num_cached_tokens=0, num_completion_tokens=2),
        timings=Timings(),
        num_attempts=1,
        energy=energy,
    )


def shown(answer: Answer, *events: Event) -> list[str]:
    return [text for event in events if (text := answer.add(event))]


def test_one_choice_is_shown_as_it_comes() -> None:
    answer = Answer()
    prompt = Prompt(first_index=0, token_ids=(5, 6), text="Say ")
    assert shown(answer, STARTED, prompt, tokens(0, 0, "hel"), tokens(0, 1, "lo\n"), finished(0)) == [
        "Say ", "hel", "lo\n",
    ]  # fmt: skip
    assert answer.ends_line


def test_several_are_shown_one_after_another() -> None:
    answer = Answer(2)
    events = (STARTED, tokens(1, 0, "b"), tokens(0, 0, "a"), tokens(1, 1, "B\n"), finished(1), finished(0))
    assert shown(answer, *events) == ["--- 1\nbB\n", "--- 0\na\n"]
    assert answer.ends_line


def test_json_has_what_was_asked_for_and_no_more() -> None:
    plain = Answer()
    shown(plain, STARTED, tokens(0, 0, "a"), finished(0))
    found = plain.to_json()
    assert not {"logprobs", "prompt_logprobs", "prompt_text", "energy", "choices"} & set(found)
    assert (found["text"], found["token_ids"], found["finish_reason"]) == ("a", [0], "eos")


def test_json_of_everything() -> None:
    answer = Answer(2)
    prompt = Prompt(first_index=0, token_ids=(5, 6), text="Say", logprobs=(TokenLogprobs(-2.0),))
    shown(
        answer, STARTED, prompt, tokens(1, 0, "b"), tokens(0, 0, "a", logprobs=True), finished(1),
        finished(0, Energy(prefill_j=2.5)),
    )  # fmt: skip
    found = answer.to_json()
    assert found["prompt_text"] == "Say"
    assert found["prompt_logprobs"] == [{"logprob": -2.0, "top": []}]
    assert found["logprobs"] == [{"logprob": -1.5, "top": [[9, -0.5]]}]
    assert found["energy"] == {"prefill_j": 2.5}
    assert [choice["text"] for choice in found["choices"]] == ["a", "b"]


def test_a_choice_without_its_end_is_no_answer() -> None:
    answer = Answer(2)
    shown(answer, STARTED, tokens(0, 0, "a"), finished(0), tokens(1, 0, "b"))
    with pytest.raises(InvariantViolated):
        answer.to_json()
