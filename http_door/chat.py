"""/v1/chat/completions: conversations, and what the model says next."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from http_door.answer import (
    Json,
    Occasion,
    TokenBytes,
    UsageSum,
    ids_named,
    prompt_logprobs,
    reason_text,
    token_name,
)
from http_door.chat_message import ChatMessageParts, delta_of
from http_door.errors import refused_field
from http_door.fields import NOT_GIVEN, TextFields, is_given
from http_door.styles import PROMPT_END_IDS, looks_for_reasoning, output_parser
from http_door.tools.choice import chat_choice, chat_functions, read_choice
from http_door.tools.port import CallBegun, OutputParser, Parsed, PlainText
from pdserve.chat import ROLES
from pdserve.request import Chat, ChatMessage, Event, Finished, Prompt, Started, Timings, Tokens
from pdserve.sampling import FinishReason, TokenLogprobs

_UNSUPPORTED = (
    "audio",
    "prediction",
    "web_search_options",
    "functions",
    "function_call",
    "mm_processor_kwargs",
    "documents",
    "best_of",
)
# What a chat does anyway; vLLM can be told to do otherwise.
_ALWAYS = {"echo": False, "add_special_tokens": False, "include_reasoning": True}


class ContentPart(msgspec.Struct, kw_only=True):
    """A part of a message; only text is understood."""

    type: str
    text: str | None = None


class ChatFields(TextFields, kw_only=True):
    """The body. messages: read one by one, since a template may read more of them than anybody has a name for."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: str | None = None
    return_tokens_as_token_ids: bool | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    include_reasoning: bool | None = None
    return_timings: bool | None = None  # ours: where the time of each choice went
    modalities: list[str] | None = None
    audio: msgspec.Raw = NOT_GIVEN
    prediction: msgspec.Raw = NOT_GIVEN
    web_search_options: msgspec.Raw = NOT_GIVEN
    functions: msgspec.Raw = NOT_GIVEN
    function_call: msgspec.Raw = NOT_GIVEN
    mm_processor_kwargs: msgspec.Raw = NOT_GIVEN
    documents: msgspec.Raw = NOT_GIVEN
    best_of: msgspec.Raw = NOT_GIVEN

    def names(self) -> dict[str, str]:
        return {} if self.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"}


@dataclass(slots=True)
class _Choice:
    """One of the answer's choices. has_role: its first delta has been sent. message: kept where it is sent whole."""

    parser: OutputParser = field(default_factory=PlainText)
    message: ChatMessageParts = field(default_factory=ChatMessageParts)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Json] = field(default_factory=list)
    reason: str | None = None
    has_role: bool = False
    has_called: bool = False
    timings: Timings | None = None


class ChatAnswer:
    """See HttpAnswer."""

    ends_with_done = True

    def __init__(self, body: ChatFields, occasion: Occasion) -> None:
        _check(body)
        self._body = body
        self._occasion = occasion
        self._id = f"chatcmpl-{occasion.request_id}"
        self._model = body.model or ""
        self._usage = UsageSum()
        self._choices = [_Choice() for _ in range(max(0, min(body.n or 1, 64)))]
        self._prompt_ids: tuple[int, ...] | None = None
        self._prompt_rows: list[Json | None] = [None]
        self.streams = body.streams
        self._names_tokens = bool(body.logprobs) or body.prompt_logprobs is not None
        word, named = chat_choice(body.tool_choice)
        self._tools = read_choice(
            chat_functions(body.tools),
            word,
            named,
            parallel=body.parallel_tool_calls,
            style=occasion.styles.tools,
        )
        max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        request = body.request(
            _chat(body, with_tools=self._tools.is_made),
            occasion.request_id,
            max_tokens=max_tokens,
            logprobs=logprobs,
            structure=self._tools.structure,
            keep_special_tokens=self._tools.needs_special_tokens,
        )
        self.requests = (request,)
        self._looks_for_reasoning = looks_for_reasoning(
            occasion.styles, has_structure=request.sampling.structure is not None
        )

    def ids_to_spell(self, event: Event) -> Collection[int]:
        if isinstance(event, Started):
            return event.prompt_token_ids[-PROMPT_END_IDS:] if self._looks_for_reasoning else ()
        return ids_named(event) if self._names_tokens else ()

    def take(self, place: int, event: Event, spelled: TokenBytes) -> Iterable[Json]:
        match event:
            case Started():
                self._model = event.model
                self._usage.add_prompt(place, event.num_prompt_tokens, event.num_cached_tokens)
                self._prompt_ids = event.prompt_token_ids
                self._begin(event.prompt_token_ids[-PROMPT_END_IDS:], spelled)
                return []
            case Prompt():
                ids = event.token_ids[-len(event.logprobs) :]
                self._prompt_rows += prompt_logprobs(event.logprobs, ids, spelled)
                return []
            case Tokens():
                self._usage.num_completion_tokens += len(event.token_ids)
                rows = None
                if self._body.logprobs:
                    by_id = bool(self._body.return_tokens_as_token_ids)
                    rows = [
                        _named(token_id, each, spelled, by_id=by_id)
                        for token_id, each in zip(event.token_ids, event.logprobs)
                    ]
                said = self._choices[event.choice].parser.feed(event.text)
                return self._note(event.choice, said, token_ids=event.token_ids, logprobs=rows)
            case Finished():
                rest = self._choices[event.choice].parser.finish()
                last = self._note(event.choice, rest) if rest else []
                return [*last, *self._end(event)]

    def end(self) -> Iterable[Json]:
        if self._body.tells_usage:
            yield {**self._head("chat.completion.chunk"), "choices": [], "usage": self._usage.content}

    def whole(self) -> Json:
        choices = []
        for number, choice in enumerate(self._choices):
            made = {
                "index": number,
                "message": choice.message.content,
                "logprobs": {"content": choice.logprobs, "refusal": None} if self._body.logprobs else None,
                "finish_reason": choice.reason,
            }
            if self._body.return_token_ids:
                made["token_ids"] = choice.token_ids
            if choice.timings is not None:
                made["timings"] = msgspec.to_builtins(choice.timings)
            choices.append(made)
        whole = {**self._head("chat.completion"), "choices": choices, "usage": self._usage.content}
        return whole | self._of_prompt()

    def _begin(self, last_ids: Sequence[int], spelled: TokenBytes) -> None:
        """The prompt is known: by its end, whether the text begins with reasoning."""
        prompt_end = None
        if self._looks_for_reasoning:
            prompt_end = b"".join(spelled[each] for each in last_ids).decode("utf-8", "replace")
            if self._body.continue_final_message:
                prompt_end = str(self._body.messages[-1].get("content") or "")
        for choice in self._choices:
            choice.parser = output_parser(
                self._occasion.styles, self._tools, self._occasion.random, prompt_end
            )

    def _note(
        self,
        number: int,
        said: Sequence[Parsed],
        *,
        token_ids: tuple[int, ...] = (),
        logprobs: list[Json] | None = None,
    ) -> list[Json]:
        """More of a choice: for a stream what is sent of it, else it is kept."""
        choice = self._choices[number]
        choice.has_called = choice.has_called or any(isinstance(part, CallBegun) for part in said)
        if not self.streams:
            choice.message.add(said)
            choice.token_ids += token_ids
            choice.logprobs += logprobs or ()
            return []
        is_told = bool(said or logprobs or self._body.return_token_ids or self._body.tells_usage_always)
        return [self._part(number, delta_of(said), token_ids, logprobs)] if is_told else []

    def _end(self, event: Finished) -> list[Json]:
        number, reason = event.choice, event.reason
        choice = self._choices[number]
        if self._body.return_timings:
            choice.timings = event.timings
        has_called = choice.has_called and reason is not FinishReason.LENGTH
        choice.reason = "tool_calls" if has_called else reason_text(reason)
        if not self.streams:
            return []
        told = {} if choice.timings is None else {"timings": msgspec.to_builtins(choice.timings)}
        return [self._part(number, {}) | told]

    def _part(
        self,
        number: int,
        delta: Json,
        token_ids: tuple[int, ...] = (),
        logprobs: list[Json] | None = None,
    ) -> Json:
        choice = self._choices[number]
        if not choice.has_role:
            choice.has_role = True
            delta = {"role": "assistant", "content": "", **delta}
        made = {
            "index": number,
            "delta": delta,
            "logprobs": None if logprobs is None else {"content": logprobs, "refusal": None},
            "finish_reason": choice.reason,
        }
        if self._body.return_token_ids:
            made["token_ids"] = token_ids
        part = {**self._head("chat.completion.chunk"), "choices": [made], **self._of_prompt()}
        self._prompt_ids, self._prompt_rows = None, [None]  # told once
        if self._body.tells_usage:
            part["usage"] = self._usage.content if self._body.tells_usage_always else None
        return part

    def _of_prompt(self) -> Json:
        """What is told of the prompt, where it was asked for."""
        told: Json = {}
        if self._body.return_token_ids and self._prompt_ids is not None:
            told["prompt_token_ids"] = self._prompt_ids
        if self._body.prompt_logprobs is not None and len(self._prompt_rows) > 1:
            told["prompt_logprobs"] = self._prompt_rows
        return told

    def _head(self, kind: str) -> Json:
        return {"id": self._id, "object": kind, "created": self._occasion.created_s, "model": self._model}


def _named(token_id: int, logprobs: TokenLogprobs, spelled: TokenBytes, *, by_id: bool) -> Json:
    """OpenAI's form of a token of a chat."""

    def row(each: int, logprob: float) -> Json:
        name = token_name(each, spelled, by_id=by_id)
        return {"token": name, "logprob": logprob, "bytes": list(spelled[each])}

    tops = [row(top_id, logprob) for top_id, logprob in logprobs.top]
    return {**row(token_id, logprobs.logprob), "top_logprobs": tops}


def _check(body: ChatFields) -> None:
    body.check_supported()
    for name in _UNSUPPORTED:
        if is_given(getattr(body, name)):
            raise refused_field(name, f"{name} isn't supported")
    for name, value in _ALWAYS.items():
        if getattr(body, name) not in (None, value):
            raise refused_field(name, f"{name} must be {str(value).lower()} in a chat")
    if body.chat_template:
        raise refused_field("chat_template", "chat_template isn't supported: it is the model's own")
    if body.modalities not in (None, ["text"]):
        raise refused_field("modalities", 'modalities must be ["text"]')
    if body.top_logprobs is not None and not body.logprobs:
        raise refused_field("top_logprobs", "top_logprobs needs logprobs")


def _chat(body: ChatFields, *, with_tools: bool) -> Chat:
    kwargs = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
    return chat_of(
        body.messages,
        tools=body.tools if with_tools else None,
        kwargs=kwargs,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
    )


def chat_of(
    messages: list[Json],
    *,
    tools: list[Json] | None,
    kwargs: Json | None,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
) -> Chat:
    """A conversation in OpenAI's form. Raises HttpRefusal for what isn't text."""
    return Chat(
        tuple(_message(place, given) for place, given in enumerate(messages)),
        tools_json=_json(tools) if tools else "",
        continue_final_message=bool(continue_final_message),
        add_generation_prompt=add_generation_prompt,
        template_kwargs_json=_json(kwargs) if kwargs else "",
    )


def _message(place: int, given: dict[str, Any]) -> ChatMessage:
    """OpenAI's form: content is a text, parts of one, or null beside tool calls."""
    extra = {
        name: value for name, value in given.items() if name not in ("role", "content") and value is not None
    }
    role, content = given.get("role"), given.get("content")
    where = f"messages[{place}]"
    if role not in ROLES:
        raise refused_field(f"{where}.role", f"{where}.role must be one of {', '.join(ROLES)}")
    if content is None:
        if role == "assistant":
            extra["content"] = None
        elif role != "tool":
            raise refused_field(f"{where}.content", f"{where}.content is missing")
        content = ""
    elif isinstance(content, list):
        content = joined_text(f"{where}.content", content)
    elif not isinstance(content, str):
        raise refused_field(f"{where}.content", f"{where}.content must be a text or a list of parts")
    return ChatMessage(role, content, _json(extra) if extra else "")


def joined_text(where: str, parts: list[Any]) -> str:
    """The text of a message's parts. Raises HttpRefusal for any that isn't text."""
    return "\n".join(_text(f"{where}[{at}]", part) for at, part in enumerate(parts))


def _text(where: str, part: Any) -> str:
    try:
        read = msgspec.convert(part, ContentPart)
    except msgspec.ValidationError as error:
        raise refused_field(where, f"{where}: {error}") from None
    if read.type not in ("text", "input_text", "output_text", "refusal") or read.text is None:
        raise refused_field(where, f"{where}: only text is supported", type=read.type[:80])
    return read.text


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
