"""Formats whose calls are the whole message, without a mark, or with one that models leave out: Llama's two.

    {"name": "f", "parameters": {…}}; {"name": "g", "parameters": {…}}
    [f(city="Paris", n=3), g()]

Without a mark only a message that begins with a call of a tool that was given holds calls.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from http_door.tools.bracketed import JSON, PYTHON, take_bracketed
from http_door.tools.calls import CallWriter, FunctionCall, json_calls
from http_door.tools.marked import pass_over
from http_door.tools.python_calls import python_calls
from http_door.tools.reader import Marks, Reader, Reading

_PYTHON_TAG = Marks("<|python_tag|>")
_PYTHON_START, _PYTHON_END = Marks("<|python_start|>", "<|python_tag|>"), Marks("<|python_end|>")
_BETWEEN = Marks(";", ",")
_FIRST_KEYS = ("name", "type", "id", "arguments", "parameters")
_HEADS = tuple(f'{bracket}{{"{key}"' for bracket in ("", "[") for key in _FIRST_KEYS)
_LONGEST_HEAD = 256  # with its white space


def read_llama3_json(text: Reader, output: CallWriter, names: Collection[str]) -> Reading[None]:
    """Llama 3.1 and 3.2. names: of the tools that were given."""
    yield from text.take_blanks()
    marked = yield from text.take_mark(_PYTHON_TAG)
    while True:
        while (yield from _take_json_calls(text, output, names, bool(marked))):
            yield from text.take_blanks()
            if (yield from text.take_mark(_BETWEEN)):
                yield from text.take_blanks()
        output.content(text.release())
        marked = yield from text.text_until(output.content, _PYTHON_TAG)
        if not marked:
            return


def read_pythonic(text: Reader, output: CallWriter, names: Collection[str]) -> Reading[None]:
    """Llama 3.2 and 4. names: of the tools that were given."""
    yield from text.take_blanks()
    marked = yield from text.take_mark(_PYTHON_START)
    while True:
        yield from text.take_blanks()
        value = ""
        if marked or (yield from _begins_python(text, names)):
            value = yield from take_bracketed(text, PYTHON)
        calls = _known(python_calls(value), None if marked else names)
        held = text.release()
        for call in calls:
            output.call(call)
        if not calls:
            output.content(held)
        elif marked:
            yield from pass_over(text, output, _PYTHON_END)
        marked = yield from text.text_until(output.content, _PYTHON_START)
        if not marked:
            return


def _take_json_calls(text: Reader, output: CallWriter, names: Collection[str], marked: bool) -> Reading[bool]:
    """Whether one stood here; if not, what was taken is held."""
    yield from text.take_blanks()
    if not marked and not (yield from _begins_json(text)):
        return False
    value = yield from take_bracketed(text, JSON)
    calls = _known(json_calls(value), None if marked else names)
    if calls:
        text.release()
    for call in calls:
        output.call(call)
    return bool(calls)


def _known(calls: Sequence[FunctionCall], names: Collection[str] | None) -> Sequence[FunctionCall]:
    return calls if names is None or all(call.name in names for call in calls) else ()


def _begins_json(text: Reader) -> Reading[bool]:
    """Whether what follows may be a call, told as soon as it shows: other JSON is an answer, and isn't held back."""
    for size in range(1, _LONGEST_HEAD):
        head = yield from text.peek(size)
        bare = "".join(head.split())
        if bare.startswith(_HEADS):
            return True
        if len(head) < size or not any(known.startswith(bare) for known in _HEADS):
            return False
    return False


def _begins_python(text: Reader, names: Collection[str]) -> Reading[bool]:
    """The same for `[f(`."""
    heads = tuple(f"[{name}(" for name in names)
    for size in range(1, _LONGEST_HEAD):
        head = yield from text.peek(size)
        bare = "".join(head.split())
        if bare.startswith(heads):
            return True
        if len(head) < size or not any(known.startswith(bare) for known in heads):
            return False
    return False
