"""One conversation, written in several ways: whatever a client calls a thing, the template finds it under its name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pdserve.errors import InvalidRequest

_REASONING = ("reasoning_content", "reasoning", "thinking")
_NEEDLE = "needle_of_an_argument"
Message = dict[str, Any]


def with_reasoning_names(message: Message) -> Message:
    """What the model thought in an earlier turn, under all names that templates and clients have for it."""
    said = next((message[name] for name in _REASONING if message.get(name)), None)
    return message if said is None else {**dict.fromkeys(_REASONING, said), **_without_empty(message)}


def _without_empty(message: Message) -> Message:
    return {key: value for key, value in message.items() if key not in _REASONING or value}


class ArgumentForm:
    """Whether a template wants a tool call's arguments as an object or as JSON text. Clients write either.

    render  a conversation by the template; raises InvalidRequest if it can't
    """

    def __init__(self, render: Callable[[Sequence[Message]], str]) -> None:
        self._render = render
        self._convert: Callable[[Any], Any] | None = None  # known once it was asked for

    def apply(self, messages: Sequence[Message]) -> list[Message]:
        """The same conversation, with arguments in the form that the template writes, if it has one."""
        if not any(isinstance(message.get("tool_calls"), list) for message in messages):
            return list(messages)
        if self._convert is None:
            self._convert = self._choose()
        return [_with_arguments(message, self._convert) for message in messages]

    def _choose(self) -> Callable[[Any], Any]:
        as_object, as_text = self._written({_NEEDLE: "x"}), self._written(json.dumps({_NEEDLE: "x"}))
        if _is_plain(as_object) and not _is_plain(as_text):
            return _parsed
        return _dumped if _is_plain(as_text) and not as_object else _as_given

    def _written(self, arguments: Any) -> str:
        """A conversation with such arguments, "" where the template refuses it or leaves them out."""
        call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": arguments}}
        for content in ("", None):
            message = {"role": "assistant", "content": content, "tool_calls": [call]}
            try:
                written = self._render([{"role": "user", "content": "x"}, message])
            except InvalidRequest:
                continue
            if _NEEDLE in written:
                return written
        return ""


class NullForm:
    """Whether a template takes null for the text of a message that only calls tools. Clients write it, or "".

    render  as for ArgumentForm
    """

    def __init__(self, render: Callable[[Sequence[Message]], str]) -> None:
        self._render = render
        self._refuses_null: bool | None = None  # known once it was asked for

    def apply(self, messages: Sequence[Message]) -> list[Message]:
        """The same conversation, with "" for null where the template takes only that."""
        if not any(map(_only_calls, messages)):
            return list(messages)
        if self._refuses_null is None:
            self._refuses_null = not self._takes(None) and self._takes("")
        if not self._refuses_null:
            return list(messages)
        return [{**message, "content": ""} if _only_calls(message) else message for message in messages]

    def _takes(self, content: str | None) -> bool:
        call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {}}}
        try:
            self._render(
                [
                    {"role": "user", "content": "x"},
                    {"role": "assistant", "content": content, "tool_calls": [call]},
                ]
            )
        except InvalidRequest:
            return False
        return True


def _is_plain(written: str) -> bool:
    """Whether a key came out as it went in: neither quoted again as JSON nor in Python's way."""
    return bool(written) and f'\\"{_NEEDLE}' not in written and f"'{_NEEDLE}'" not in written


def _as_given(arguments: Any) -> Any:
    return arguments


def _with_arguments(message: Message, convert: Callable[[Any], Any]) -> Message:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_converted(call, convert) for call in calls]}


def _converted(call: Any, convert: Callable[[Any], Any]) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or "arguments" not in function:
        return call
    return {**call, "function": {**function, "arguments": convert(function["arguments"])}}


def _parsed(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments  # whatever a model once wrote
    return found if isinstance(found, dict) else arguments


def _dumped(arguments: Any) -> Any:
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, Mapping) else arguments


def _only_calls(message: Message) -> bool:
    return message.get("content", "") is None and bool(message.get("tool_calls"))
