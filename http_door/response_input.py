"""The input of a response as a conversation: items in, messages of a chat out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from http_door.answer import Json
from http_door.chat import joined_text
from http_door.errors import refused_field
from http_door.tools.choice import Function

_ROLES = ("system", "developer", "user", "assistant")


def chat_messages(given: str | Sequence[Json], instructions: str | None) -> list[Json]:
    """Messages in a chat's form; calls that follow each other are of one message. Raises HttpRefusal."""
    messages: list[Json] = [] if instructions is None else [{"role": "system", "content": instructions}]
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    reasoning = ""
    for place, item in enumerate(given):
        where = f"input[{place}]"
        match item.get("type", "message"):
            case "message":
                message = _message(where, item)
            case "function_call":
                message = {"role": "assistant", "content": None, "tool_calls": [_call(where, item)]}
                last = messages[-1] if messages else {}
                if last.get("tool_calls"):
                    last["tool_calls"] += message["tool_calls"]
                    continue
                if last.get("role") == "assistant":
                    last["tool_calls"] = message["tool_calls"]
                    continue
            case "function_call_output":
                content = _output(where, item)
                message = {"role": "tool", "tool_call_id": _text(where, item, "call_id"), "content": content}
            case "reasoning":
                reasoning = _reasoning(where, item)
                continue
            case other:
                raise refused_field(f"{where}.type", f"{where}.type isn't supported", value=str(other)[:80])
        if reasoning and message["role"] == "assistant":
            message["reasoning_content"], reasoning = reasoning, ""
        messages.append(message)
    return messages


def response_functions(tools: Sequence[Json] | None) -> list[Function]:
    """Tools in a response's form, which is flat. Raises HttpRefusal."""
    found = []
    for place, tool in enumerate(tools or ()):
        where = f"tools[{place}]"
        if tool.get("type") != "function":
            raise refused_field(
                f"{where}.type", f"{where}.type must be function", value=str(tool.get("type"))[:80]
            )
        parameters = tool.get("parameters")
        if parameters is not None and not isinstance(parameters, dict):
            raise refused_field(f"{where}.parameters", f"{where}.parameters must be an object")
        found.append(Function(name=_text(where, tool, "name"), parameters=parameters))
    return found


def response_choice(given: str | Mapping[str, Any] | None) -> tuple[str | None, str | None]:
    """A response's tool_choice as `read_choice` has it. Raises HttpRefusal."""
    if given is None or isinstance(given, str):
        return given, None
    name = given.get("name")
    if given.get("type") != "function" or not isinstance(name, str):
        raise refused_field("tool_choice", 'tool_choice as an object is {"type": "function", "name": …}')
    return None, name


def _message(where: str, item: Json) -> Json:
    role, content = item.get("role"), item.get("content")
    if role not in _ROLES:
        raise refused_field(f"{where}.role", f"{where}.role must be one of {', '.join(_ROLES)}")
    if not isinstance(content, str | list):
        raise refused_field(f"{where}.content", f"{where}.content must be a text or a list of parts")
    return {"role": role, "content": _joined(f"{where}.content", content)}


def _call(where: str, item: Json) -> Json:
    name, arguments = _text(where, item, "name"), _text(where, item, "arguments")
    function = {"name": name, "arguments": arguments}
    return {"id": _text(where, item, "call_id"), "type": "function", "function": function}


def _output(where: str, item: Json) -> str:
    output = item.get("output")
    if not isinstance(output, str | list):
        raise refused_field(f"{where}.output", f"{where}.output must be a text or a list of parts")
    return _joined(f"{where}.output", output)


def _joined(where: str, given: str | list[Any]) -> str:
    return given if isinstance(given, str) else joined_text(where, given)


def _reasoning(where: str, item: Json) -> str:
    parts = item.get("content") or []
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise refused_field(f"{where}.content", f"{where}.content must be a list of parts")
    return "".join(str(part.get("text", "")) for part in parts)


def _text(where: str, item: Json, name: str) -> str:
    found = item.get(name)
    if not isinstance(found, str):
        raise refused_field(f"{where}.{name}", f"{where}.{name} must be a text")
    return found
