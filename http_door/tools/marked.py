"""Formats whose calls are JSON between marks: hermes, Phi-4, and Mistral's.

<tool_call>{"name": "f", "arguments": {…}}</tool_call>
<|tool_call|>[{"name": "f", "arguments": {…}}]<|/tool_call|>, or functools[…]
[TOOL_CALLS][{"name": "f", "arguments": {…}}], or [TOOL_CALLS]f[ARGS]{…}
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from http_door.tools.bracketed import JSON, take_bracketed
from http_door.tools.calls import CallWriter, FunctionCall, json_calls, json_object
from http_door.tools.reader import Marks, Reader, Reading

_NAME = re.compile(r"[\w.-]*")
_TOOL_CALLS, _CALL_ID, _ARGS = Marks("[TOOL_CALLS]"), Marks("[CALL_ID]"), Marks("[ARGS]")
_HERMES = {"<tool_call>": Marks("</tool_call>")}
_PHI4 = {
    "<|tool_call|>": Marks("<|/tool_call|>"),
    "<|tool_calls|>": Marks("<|/tool_calls|>"),
    "functools": None,
}


def read_hermes(text: Reader, output: CallWriter) -> Reading[None]:
    """Qwen 2.5 and 3, Hermes, SmolLM and others."""
    return _read_marked(text, output, _HERMES)


def read_phi4(text: Reader, output: CallWriter) -> Reading[None]:
    """Phi-4-mini."""
    return _read_marked(text, output, _PHI4)


def read_mistral(text: Reader, output: CallWriter) -> Reading[None]:
    """Mistral and Ministral, old and new."""
    while (yield from text.text_until(output.content, _TOOL_CALLS)):
        yield from text.take_blanks()
        begin = text.mark()
        yield from text.take_run(_NAME)
        name = text.since(begin)
        if name and (yield from text.take_mark(_CALL_ID)):
            yield from text.take_run(_NAME)
        if name:
            yield from text.take_mark(_ARGS)
            yield from text.take_blanks()
        value = yield from take_bracketed(text, JSON)
        _say(text, output, _named(name, value) if name else json_calls(value))


def _read_marked(text: Reader, output: CallWriter, closing: Mapping[str, Marks | None]) -> Reading[None]:
    openings = Marks(*closing)
    while opening := (yield from text.text_until(output.content, openings)):
        yield from text.take_blanks()
        value = yield from take_bracketed(text, JSON)
        end = closing[opening]
        if _say(text, output, json_calls(value)) and end is not None:
            yield from pass_over(text, output, end)


def pass_over(text: Reader, output: CallWriter, end: Marks) -> Reading[None]:
    """The mark behind a call, if it is there."""
    yield from text.take_blanks()
    closed = yield from text.take_mark(end)
    held = text.release()
    if not closed:
        output.content(held)


def _say(text: Reader, output: CallWriter, calls: Sequence[FunctionCall]) -> bool:
    """What is held: calls, or content. Says whether it was calls."""
    held = text.release()
    for call in calls:
        output.call(call)
    if not calls:
        output.content(held)
    return bool(calls)


def _named(name: str, value: str) -> Sequence[FunctionCall]:
    try:
        return [FunctionCall(name, json_object(value))]
    except ValueError:
        return ()
