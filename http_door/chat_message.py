"""What was parsed of a text, as OpenAI's chats have it: parts of a stream, and the whole message."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from http_door.answer import Json
from http_door.tools.port import Arguments, CallBegun, Content, Parsed, Reasoning


@dataclass(slots=True)
class _CallParts:
    call_id: str
    name: str
    arguments: list[str] = field(default_factory=list)


@dataclass(slots=True)
class ChatMessageParts:
    """Of one choice, as it comes."""

    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[_CallParts] = field(default_factory=list)

    def add(self, parts: Iterable[Parsed]) -> None:
        """More of it."""
        for part in parts:
            match part:
                case Content(text):
                    self.texts.append(text)
                case Reasoning(text):
                    self.reasoning.append(text)
                case CallBegun(_, call_id, name):
                    self.calls.append(_CallParts(call_id, name))
                case Arguments(index, text):
                    self.calls[index].arguments.append(text)

    @property
    def content(self) -> Json:
        """The message. Its text is null beside calls if there is none."""
        text = "".join(self.texts)
        made: Json = {
            "role": "assistant",
            "content": None if self.calls and not text else text,
            "refusal": None,
        }
        if self.reasoning:
            made["reasoning_content"] = "".join(self.reasoning)
        if self.calls:
            made["tool_calls"] = [
                _call(each.call_id, each.name, "".join(each.arguments)) for each in self.calls
            ]
        return made


def delta_of(parts: Iterable[Parsed]) -> Json:
    """One part of a stream; at least a text, if there is nothing else."""
    texts: list[str] = []
    reasoning: list[str] = []
    calls: dict[int, Json] = {}
    for part in parts:
        match part:
            case Content(text):
                texts.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case CallBegun(index, call_id, name):
                calls[index] = {"index": index, **_call(call_id, name, "")}
            case Arguments(index, text):
                call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                call["function"]["arguments"] += text
    delta: Json = {}
    if texts or not (reasoning or calls):
        delta["content"] = "".join(texts)
    if reasoning:
        delta["reasoning_content"] = "".join(reasoning)
    if calls:
        delta["tool_calls"] = list(calls.values())
    return delta


def _call(call_id: str, name: str, arguments: str) -> Json:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
