"""What every endpoint for text has in common, once its body is understood: requests out, events in, JSON out."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from http_door.styles import Styles
from pdserve.ids import Random
from pdserve.request import Event, GenerateRequest, Usage
from pdserve.sampling import FinishReason, TokenLogprobs

Json = dict[str, Any]
TokenBytes = Mapping[int, bytes]
"""What ids add to a text, of all ids of `HttpAnswer.ids_to_spell`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Occasion:
    """What an answer is made with, besides the body.

    request_id  of the request
    created_s   since 1970
    random      draws ids of calls
    styles      how the model's text is taken apart
    """

    request_id: str
    created_s: int
    random: Random
    styles: Styles


class HttpAnswer(Protocol):
    """The answer to one HTTP request, in an endpoint's own form. One for each; it keeps what the whole needs.

    requests  what is to be generated; choices of requests[i] are numbered behind those of requests[i - 1]
    streams   whether the answer comes in parts
    ends_with_done  whether a stream's last line is [DONE]
    """

    ends_with_done: bool

    @property
    def requests(self) -> Sequence[GenerateRequest]: ...

    @property
    def streams(self) -> bool: ...

    def ids_to_spell(self, event: Event) -> Collection[int]:
        """Of which tokens `take` needs the text."""
        ...

    def take(self, place: int, event: Event, spelled: TokenBytes) -> Iterable[Json]:
        """Note an event of requests[place]; the parts of a stream that it makes."""
        ...

    def end(self) -> Iterable[Json]:
        """All requests have ended: the last parts of a stream."""
        ...

    def whole(self) -> Json:
        """All of it, for a client that doesn't stream; after `end`."""
        ...


@dataclass(slots=True)
class UsageSum:
    """Of all requests of one answer: a prompt counts once, however many choices it has."""

    prompts: dict[int, Usage] = field(default_factory=dict)
    num_completion_tokens: int = 0
    num_reasoning_tokens: int = 0  # about: of events that said some

    def add_prompt(self, place: int, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """Of requests[place], when it has started."""
        self.prompts[place] = Usage(
            num_prompt_tokens=num_prompt_tokens, num_cached_tokens=num_cached_tokens, num_completion_tokens=0
        )

    @property
    def content(self) -> Json:
        """OpenAI's usage object."""
        num_prompt = sum(each.num_prompt_tokens for each in self.prompts.values())
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": num_prompt + self.num_completion_tokens,
            "prompt_tokens_details": {
                "cached_tokens": sum(each.num_cached_tokens for each in self.prompts.values())
            },
        }

    @property
    def of_response(self) -> Json:
        """The same in /v1/responses."""
        told = self.content
        return {
            "input_tokens": told["prompt_tokens"],
            "input_tokens_details": told["prompt_tokens_details"],
            "output_tokens": told["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self.num_reasoning_tokens},
            "total_tokens": told["total_tokens"],
        }


def reason_text(reason: FinishReason) -> str:
    """OpenAI's word."""
    return "length" if reason is FinishReason.LENGTH else "stop"


def ids_named(event: Event) -> set[int]:
    """All ids that an event says anything of."""
    ids: set[int] = set(getattr(event, "token_ids", ()))
    for each in getattr(event, "logprobs", ()):
        ids.update(token_id for token_id, _ in each.top)
    return ids


def shown(spelled: bytes) -> str:
    """A token's text; bytes that are no text by themselves are replaced."""
    return spelled.decode("utf-8", "replace")


def token_name(token_id: int, spelled: TokenBytes, *, by_id: bool) -> str:
    """What a list of log-probabilities calls a token. by_id: vLLM's return_tokens_as_token_ids."""
    return f"token_id:{token_id}" if by_id else shown(spelled[token_id])


def prompt_logprobs(logprobs: Iterable[TokenLogprobs], ids: Iterable[int], spelled: TokenBytes) -> list[Json]:
    """vLLM's form: for each token an object of ids."""
    return [_ranked(each, token_id, spelled) for token_id, each in zip(ids, logprobs)]


def _ranked(logprobs: TokenLogprobs, token_id: int, spelled: TokenBytes) -> Json:
    """Of the most likely ones, by rank, and of the token itself, whose rank isn't known if it isn't among them."""
    rows: dict[int, Json] = {}
    for rank, (top_id, logprob) in enumerate(logprobs.top, 1):
        rows[top_id] = {"logprob": logprob, "rank": rank, "decoded_token": shown(spelled[top_id])}
    own = rows.setdefault(token_id, {"rank": None, "decoded_token": shown(spelled[token_id])})
    own["logprob"] = logprobs.logprob
    return {str(each): row for each, row in rows.items()}
