"""/v1/completions: prompts as text or ids, one or many, and what comes of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

import msgspec

from http_door.answer import (
    Json,
    Occasion,
    TokenBytes,
    UsageSum,
    ids_named,
    prompt_logprobs,
    reason_text,
    shown,
    token_name,
)
from http_door.errors import refused_field
from http_door.fields import NOT_GIVEN, TextFields, is_given
from pdserve.request import Event, Finished, GenerateRequest, Input, Prompt, Started, Tokens
from pdserve.sampling import TokenLogprobs

MAX_PROMPTS = 1024
DEFAULT_MAX_TOKENS = 16  # OpenAI's, of this endpoint


class CompletionFields(TextFields, kw_only=True):
    """The body."""

    prompt: str | list[int | str | list[int]]
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None
    return_tokens_as_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    prompt_embeds: msgspec.Raw = NOT_GIVEN


@dataclass(slots=True)
class _Logprobs:
    """OpenAI's four parallel lists of a choice, growing."""

    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    @property
    def content(self) -> Json:
        return {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        }

    def extend(self, more: _Logprobs) -> None:
        self.tokens += more.tokens
        self.token_logprobs += more.token_logprobs
        self.top_logprobs += more.top_logprobs
        self.text_offset += more.text_offset


@dataclass(slots=True)
class _Choice:
    """One of the answer's choices. num_characters: of its tokens' texts so far."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: _Logprobs = field(default_factory=_Logprobs)
    reason: str | None = None
    num_characters: int = 0


class CompletionAnswer:
    """See HttpAnswer."""

    ends_with_done = True

    def __init__(self, body: CompletionFields, occasion: Occasion) -> None:
        _check(body)
        self._body = body
        self._id = f"cmpl-{occasion.request_id}"
        self._created_s = occasion.created_s
        self._n = body.n or 1
        self._model = body.model or ""
        self._usage = UsageSum()
        self._choices: dict[int, _Choice] = {}
        self._prompt_ids: dict[int, tuple[int, ...]] = {}
        self._prompt_rows: dict[int, list[Json | None]] = {}
        self.streams = body.streams
        self._names_tokens = body.logprobs is not None or body.prompt_logprobs is not None
        self.requests = tuple(_requests(body, occasion.request_id))

    def ids_to_spell(self, event: Event) -> Collection[int]:
        return ids_named(event) if self._names_tokens else ()

    def take(self, place: int, event: Event, spelled: TokenBytes) -> Iterable[Json]:
        match event:
            case Started():
                self._model = event.model
                self._usage.add_prompt(place, event.num_prompt_tokens, event.num_cached_tokens)
                self._prompt_ids[place] = event.prompt_token_ids
                return []
            case Prompt():
                return self._take_prompt(place, event, spelled)
            case Tokens():
                self._usage.num_completion_tokens += len(event.token_ids)
                return self._take_tokens(place * self._n + event.choice, event, spelled)
            case Finished():
                number = place * self._n + event.choice
                return self._note(number, "", reason=reason_text(event.reason))

    def end(self) -> Iterable[Json]:
        if self._body.tells_usage:
            yield {**self._head, "choices": [], "usage": self._usage.content}

    def whole(self) -> Json:
        choices = []
        for number, choice in sorted(self._choices.items()):
            made = {
                "index": number,
                "text": "".join(choice.texts),
                "logprobs": choice.logprobs.content if self._body.logprobs is not None else None,
                "finish_reason": choice.reason,
            }
            if self._body.prompt_logprobs is not None:
                made["prompt_logprobs"] = self._prompt_rows.get(number // self._n)
            if self._body.return_token_ids:
                made["token_ids"] = choice.token_ids
                made["prompt_token_ids"] = self._prompt_ids[number // self._n]
            choices.append(made)
        return {**self._head, "choices": choices, "usage": self._usage.content}

    def _take_prompt(self, place: int, event: Prompt, spelled: TokenBytes) -> Iterator[Json]:
        if self._body.prompt_logprobs is not None:
            rows = self._prompt_rows.setdefault(place, [] if event.first_index else [None])
            rows += prompt_logprobs(event.logprobs, event.token_ids[-len(event.logprobs) :], spelled)
        for number in range(place * self._n, (place + 1) * self._n) if self._body.echo else ():
            logprobs = None
            if self._body.logprobs is not None:
                known: tuple[TokenLogprobs | None, ...] = event.logprobs
                known = (None,) * (len(event.token_ids) - len(known)) + known
                logprobs = self._named(self._choice(number), event.token_ids, known, spelled)
            yield from self._note(number, event.text, logprobs=logprobs)

    def _take_tokens(self, number: int, event: Tokens, spelled: TokenBytes) -> Iterable[Json]:
        logprobs = None
        if self._body.logprobs is not None:
            logprobs = self._named(self._choice(number), event.token_ids, event.logprobs, spelled)
        return self._note(number, event.text, token_ids=event.token_ids, logprobs=logprobs)

    def _named(
        self,
        choice: _Choice,
        ids: Iterable[int],
        logprobs: Iterable[TokenLogprobs | None],
        spelled: TokenBytes,
    ) -> _Logprobs:
        """The lists for some tokens of a choice, which come behind those that it had."""
        made = _Logprobs()
        for token_id, each in zip(ids, logprobs):
            name = self._name(token_id, spelled)
            made.tokens.append(name)
            made.token_logprobs.append(None if each is None else each.logprob)
            made.top_logprobs.append(None if each is None else self._tops(token_id, each, spelled))
            made.text_offset.append(choice.num_characters)
            choice.num_characters += len(shown(spelled[token_id]))
        return made

    def _tops(self, token_id: int, logprobs: TokenLogprobs, spelled: TokenBytes) -> dict[str, float]:
        """The most likely ones, best first, and the token's own. Of two with one text the likelier is told."""
        found: dict[str, float] = {}
        for top_id, logprob in (*logprobs.top, (token_id, logprobs.logprob)):
            found.setdefault(self._name(top_id, spelled), logprob)
        return found

    def _name(self, token_id: int, spelled: TokenBytes) -> str:
        return token_name(token_id, spelled, by_id=bool(self._body.return_tokens_as_token_ids))

    def _note(
        self,
        number: int,
        text: str,
        *,
        token_ids: tuple[int, ...] = (),
        logprobs: _Logprobs | None = None,
        reason: str | None = None,
    ) -> list[Json]:
        """More of a choice: for a stream what is sent of it, else it is kept."""
        if self.streams:
            return [self._part(number, text, token_ids, logprobs, reason)]
        choice = self._choice(number)
        choice.texts.append(text)
        choice.token_ids += token_ids
        choice.reason = reason
        if logprobs is not None:
            choice.logprobs.extend(logprobs)
        return []

    def _part(
        self,
        number: int,
        text: str,
        token_ids: tuple[int, ...],
        logprobs: _Logprobs | None,
        reason: str | None,
    ) -> Json:
        made = {
            "index": number,
            "text": text,
            "logprobs": None if logprobs is None else logprobs.content,
            "finish_reason": reason,
        }
        place, rest = divmod(number, self._n)
        if self._body.return_token_ids:
            made["token_ids"] = token_ids
            if not rest and (prompt_ids := self._prompt_ids.pop(place, None)) is not None:
                made["prompt_token_ids"] = prompt_ids
        if not rest and (rows := self._prompt_rows.pop(place, None)) is not None:
            made["prompt_logprobs"] = rows
        part = {**self._head, "choices": [made]}
        if self._body.tells_usage:
            part["usage"] = self._usage.content if self._body.tells_usage_always else None
        return part

    @property
    def _head(self) -> Json:
        return {
            "id": self._id, "object": "text_completion", "created": self._created_s, "model": self._model,
        }  # fmt: skip

    def _choice(self, number: int) -> _Choice:
        return self._choices.setdefault(number, _Choice())


def _check(body: CompletionFields) -> None:
    body.check_supported()
    if body.suffix:
        raise refused_field("suffix", "suffix isn't supported: the model writes on, not in between")
    if is_given(body.prompt_embeds):
        raise refused_field("prompt_embeds", "prompt_embeds isn't supported: send text or token ids")
    if body.add_special_tokens is False:
        raise refused_field("add_special_tokens", "add_special_tokens false isn't supported: send token ids")


def _requests(body: CompletionFields, id_: str) -> Iterator[GenerateRequest]:
    prompts = _prompts(body.prompt)
    for place, prompt in enumerate(prompts):
        yield body.request(
            prompt,
            id_ if len(prompts) == 1 else f"{id_}-{place}",
            max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
            logprobs=body.logprobs,
            best_of=body.best_of,
            echo=body.echo,
        )


def _prompts(given: str | list[int | str | list[int]]) -> list[Input]:
    """One text, ids of one, several texts, ids of several; a mixture of the last two will do."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise refused_field("prompt", "prompt must not be empty")
    ids = [each for each in given if isinstance(each, int)]
    if len(ids) == len(given):
        return [tuple(ids)]
    if ids:
        raise refused_field("prompt", "prompt must be a text, token ids, or a list of these")
    if len(given) > MAX_PROMPTS:
        raise refused_field("prompt", "prompt holds too many", limit=MAX_PROMPTS, value=len(given))
    return [each if isinstance(each, str) else tuple(each) for each in given if not isinstance(each, int)]
