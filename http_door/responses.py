"""/v1/responses: the newer form of a conversation. Nothing is kept: the whole conversation comes with each request."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import msgspec

from http_door.answer import Json, Occasion, TokenBytes, UsageSum
from http_door.chat import chat_of
from http_door.errors import refused_field
from http_door.fields import NOT_GIVEN, TextFields, is_given, only_one
from http_door.response_input import chat_messages, response_choice, response_functions
from http_door.response_items import ResponseItems
from http_door.styles import PROMPT_END_IDS, looks_for_reasoning, output_parser
from http_door.tools.choice import read_choice
from http_door.tools.port import OutputParser, PlainText, Reasoning
from pdserve.request import Event, Finished, Started, Tokens
from pdserve.sampling import FinishReason
from pdserve.structure import Structure

_KEPT_ELSEWHERE = ("previous_response_id", "conversation", "prompt")
_OF_OTHERS = ("n", "max_tokens", "response_format", "prompt_logprobs", "return_token_ids")


class TextFormat(msgspec.Struct, kw_only=True):
    """text.format: type text, json_object or json_schema."""

    type: str
    schema: dict[str, Any] | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class TextSettings(msgspec.Struct, kw_only=True):
    """text."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningSettings(msgspec.Struct, kw_only=True):
    """reasoning. effort is for the template; summaries aren't made."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponseFields(TextFields, kw_only=True):
    """The body."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    metadata: dict[str, str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    truncation: str | None = None
    include: list[str] | None = None
    background: bool | None = None
    top_logprobs: int | None = None
    previous_response_id: msgspec.Raw = NOT_GIVEN
    conversation: msgspec.Raw = NOT_GIVEN
    prompt: msgspec.Raw = NOT_GIVEN
    max_tool_calls: int | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class ResponseAnswer:
    """See HttpAnswer."""

    ends_with_done = False

    def __init__(self, body: ResponseFields, occasion: Occasion) -> None:
        _check(body)
        self._body = body
        self._occasion = occasion
        self._model = body.model or ""
        self._usage = UsageSum()
        self._items = ResponseItems(occasion.request_id)
        self._parser: OutputParser = PlainText()
        self._status = "in_progress"
        self._num_events = 0
        self.streams = body.streams
        choice, named = response_choice(body.tool_choice)
        functions = response_functions(body.tools)
        self._tools = read_choice(
            functions, choice, named, parallel=body.parallel_tool_calls, style=occasion.styles.tools
        )
        kwargs = dict(body.chat_template_kwargs or {})
        if body.reasoning is not None and body.reasoning.effort is not None:
            kwargs.setdefault("reasoning_effort", body.reasoning.effort)
        seen = [{"type": "function", "function": _described(tool)} for tool in body.tools or ()]
        chat = chat_of(
            chat_messages(body.input, body.instructions),
            tools=seen if self._tools.is_made else None,
            kwargs=kwargs,
            add_generation_prompt=None,
            continue_final_message=None,
        )
        request = body.request(
            chat,
            occasion.request_id,
            max_tokens=body.max_output_tokens,
            logprobs=None,
            structure=only_one(self._tools.structure, _structure(body.text)),
            keep_special_tokens=self._tools.needs_special_tokens,
        )
        self.requests = (request,)
        self._looks_for_reasoning = looks_for_reasoning(
            occasion.styles, has_structure=request.sampling.structure is not None
        )

    def ids_to_spell(self, event: Event) -> Collection[int]:
        if isinstance(event, Started) and self._looks_for_reasoning:
            return event.prompt_token_ids[-PROMPT_END_IDS:]
        return ()

    def take(self, place: int, event: Event, spelled: TokenBytes) -> Iterable[Json]:
        events = list(self._numbered(self._events(place, event, spelled)))
        return events if self.streams else []

    def end(self) -> Iterable[Json]:
        return self._numbered([{"type": f"response.{self._status}", "response": self.whole()}])

    def whole(self) -> Json:
        body = self._body
        is_cut = self._status == "incomplete"
        return {
            "id": f"resp_{self._occasion.request_id}",
            "object": "response",
            "created_at": self._occasion.created_s,
            "status": self._status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": list(self._items.items),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": _format(body.text)},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None if self._status == "in_progress" else self._usage.of_response,
            "user": body.user,
        }

    def _events(self, place: int, event: Event, spelled: TokenBytes) -> Iterator[Json]:
        match event:
            case Started():
                self._model = event.model
                self._usage.add_prompt(place, event.num_prompt_tokens, event.num_cached_tokens)
                prompt_end = None
                if self._looks_for_reasoning:
                    ids = event.prompt_token_ids[-PROMPT_END_IDS:]
                    prompt_end = b"".join(spelled[each] for each in ids).decode("utf-8", "replace")
                self._parser = output_parser(
                    self._occasion.styles, self._tools, self._occasion.random, prompt_end
                )
                for kind in ("created", "in_progress"):
                    yield {"type": f"response.{kind}", "response": self.whole()}
            case Tokens():
                self._usage.num_completion_tokens += len(event.token_ids)
                parts = self._parser.feed(event.text)
                if any(isinstance(part, Reasoning) for part in parts):
                    self._usage.num_reasoning_tokens += len(event.token_ids)
                yield from self._items.take(parts)
            case Finished():
                yield from self._items.take(self._parser.finish())
                self._status = "incomplete" if event.reason is FinishReason.LENGTH else "completed"
                yield from self._items.close(self._status)

    def _numbered(self, events: Iterable[Json]) -> Iterator[Json]:
        for event in events:
            yield {**event, "sequence_number": self._num_events}
            self._num_events += 1


def _check(body: ResponseFields) -> None:
    body.check_supported()
    for name in _KEPT_ELSEWHERE:
        if is_given(getattr(body, name)):
            raise refused_field(
                name, f"{name} isn't supported: nothing is kept, so send the whole conversation"
            )
    for name in _OF_OTHERS:
        if getattr(body, name) is not None:
            raise refused_field(name, f"{name} isn't a field of responses")
    if body.tells_usage:
        raise refused_field("stream_options.include_usage", "the last event of a response tells usage anyway")
    if body.background:
        raise refused_field("background", "background isn't supported: nothing is kept")
    if body.include:
        raise refused_field("include", "include isn't supported", value=body.include[0][:80])
    if body.top_logprobs:
        raise refused_field("top_logprobs", "top_logprobs isn't supported here: /v1/chat/completions has it")
    if body.truncation not in (None, "disabled"):
        raise refused_field("truncation", 'truncation must be "disabled"', value=body.truncation[:80])
    if body.max_tool_calls is not None:
        raise refused_field("max_tool_calls", "max_tool_calls is about tools that run here, and none do")


def _described(tool: Json) -> Json:
    """A tool as a chat's function."""
    return {name: value for name, value in tool.items() if name != "type"}


def _structure(text: TextSettings | None) -> Structure | None:
    made = None if text is None else text.format
    match None if made is None else made.type:
        case None | "text":
            return None
        case "json_object":
            return Structure.json_object()
        case "json_schema":
            assert made is not None
            if made.schema is None:
                raise refused_field("text.format.schema", "text.format.schema is missing")
            return Structure.json_schema(json.dumps(made.schema))
        case other:
            raise refused_field("text.format.type", "text.format.type isn't supported", value=other[:80])


def _format(text: TextSettings | None) -> Json:
    """As it was asked for."""
    if text is None or text.format is None:
        return {"type": "text"}
    told: Json = {
        each: value for each, value in msgspec.structs.asdict(text.format).items() if value is not None
    }
    return told
