"""Generations as a backend tells them, of texts that tests write."""

from __future__ import annotations

from collections.abc import Iterable

from pdserve.request import Event, Finished, Started, Timings, Tokens, Usage
from pdserve.sampling import FinishReason

SPELLED = {1: b"<|assistant|>", 2: b"<think>", 3: b"\n"}


def events_of(
    text: str, reason: FinishReason = FinishReason.EOS, prompt: tuple[int, ...] = (1,), size: int = 3
) -> Iterable[Event]:
    """A generation of this text, in pieces of one token each; prompt: ids of SPELLED."""
    yield Started(
        request_id="r",
        seed=1,
        num_prompt_tokens=len(prompt),
        num_cached_tokens=0,
        prompt_token_ids=prompt,
        model="m",
    )
    for number, at in enumerate(range(0, len(text), size)):
        yield Tokens(choice=0, first_index=number, token_ids=(7,), text=text[at : at + size])
    usage = Usage(num_prompt_tokens=1, num_cached_tokens=0, num_completion_tokens=len(text))
    yield Finished(choice=0, reason=reason, usage=usage, timings=Timings(), num_attempts=1)
