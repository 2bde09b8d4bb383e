"""A model's chat template: Jinja in a sandbox, with the names that templates expect.

Templates come with model folders and are not trusted: they see plain data only. What they may take of time and memory
is limited by the process that they run in (pdserve/children/renderer.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pdserve.chat_forms import ArgumentForm, NullForm, with_reasoning_names
from pdserve.clock import Clock
from pdserve.errors import InvalidRequest

MAX_DEPTH = 100  # of lists and objects inside messages and tools
_CONTINUE_MARK = (
    "\ue000continue\ue001 "  # private-use characters; the last space tells whether the template trims
)


class ChatTemplate:
    """One compiled template. `render` may be called from any thread."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], clock: Clock) -> None:
        """Compile a template; one that doesn't compile is told at each `render`, not here: text still works."""
        self._special_tokens = dict(special_tokens)
        self._clock = clock
        self._broken: str | None = None
        self._arguments = ArgumentForm(self._render_plainly)
        self._nulls = NullForm(self._render_plainly)
        environment = _environment(clock)
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError, SyntaxError) as error:
            self._broken = _one_line(error)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation.

        messages   each with `role` and what the template reads of `content`, …
        variables  what else the template may read, e.g. enable_thinking
        Raises InvalidRequest for messages that the template refuses, and for templates that break.
        """
        if self._broken is not None:
            raise InvalidRequest("the model's chat template doesn't compile", why=self._broken)
        chat = [
            with_reasoning_names(_plain_message(index, message)) for index, message in enumerate(messages)
        ]
        if not chat:
            raise InvalidRequest("a chat needs at least one message")
        chat = self._nulls.apply(self._arguments.apply(chat))
        final = ""
        if continue_final_message:
            if add_generation_prompt:
                raise InvalidRequest("continue_final_message and add_generation_prompt exclude each other")
            final = _mark(chat[-1])
        text = self._render(
            {
                "documents": None,
                **_plain(variables or {}),
                "messages": chat,
                "tools": _plain(list(tools)) if tools else None,
                "add_generation_prompt": add_generation_prompt,
            }
        )
        return _cut_at_mark(text, final) if continue_final_message else text

    def _render_plainly(self, chat: Sequence[Mapping[str, Any]]) -> str:
        return self._render(
            {"messages": chat, "tools": None, "documents": None, "add_generation_prompt": False}
        )

    def _render(self, variables: dict[str, Any]) -> str:
        try:
            return self._template.render({**self._special_tokens, **variables})
        except jinja2.exceptions.SecurityError as error:
            raise InvalidRequest(
                "the chat template needs what the sandbox forbids", why=_one_line(error)
            ) from error
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ) as error:
            raise InvalidRequest("the chat template refused the messages", why=_one_line(error)) from error


class _Generation(Extension):
    """`{% generation %} … {% endgeneration %}` marks what an assistant wrote, for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("spoken"), [], [], body).set_lineno(line)

    def spoken(self, caller: Macro) -> str:
        return str(caller())


class _Environment(ImmutableSandboxedEnvironment):
    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        # Jinja's own would read as an empty text; what a template needs and doesn't get must be told.
        raise jinja2.exceptions.SecurityError(f"attribute {attribute!r} of {type(obj).__name__!r}")


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace without names that could reach the interpreter's own."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # as Jinja's: `namespace(self=…)` works
        self, rest = args[0], args[1:]
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"  # what it holds may be anything, itself included


class _Dict:
    """What templates may do with the name `dict`; the type itself would lead to the interpreter's own."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _environment(clock: Clock) -> _Environment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.fromtimestamp(clock.wall_ns() / 1e9).strftime(
        form
    )
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment


def _mark(message: dict[str, Any]) -> str:
    """Put the mark behind a message's text, or behind the last text of its parts; returns that text."""
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + _CONTINUE_MARK
        return content
    for part in reversed(content if isinstance(content, list) else []):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            text: str = part["text"]
            part["text"] = text + _CONTINUE_MARK
            return text
    raise InvalidRequest("continue_final_message needs text in the last message")


def _cut_at_mark(text: str, final: str) -> str:
    place = text.rfind(_CONTINUE_MARK.strip())
    if place < 0 or final.strip() not in text:
        raise InvalidRequest(
            "continue_final_message doesn't work here: the template leaves out or changes its text"
        )
    if text.startswith(_CONTINUE_MARK, place):
        return text[:place]
    # The template trims messages; what stood before the mark would have been trimmed too.
    return text[:place].rstrip()


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies that hold JSON data only. Raises InvalidRequest for anything else, and for no messages."""
    if not messages:
        raise InvalidRequest("a chat needs at least one message")
    return [_plain_message(index, message) for index, message in enumerate(messages)]


def _plain_message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise InvalidRequest("a chat message needs a role", index=index)
    return {str(key): _plain(value) for key, value in message.items()}


def _plain(value: Any, depth: int = 0) -> Any:
    """JSON data only: other objects have methods that the sandbox doesn't know.

    depth  lists and objects around it
    """
    if depth > MAX_DEPTH:
        raise InvalidRequest("chat messages and tools are nested too deep", limit=MAX_DEPTH)
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, depth + 1) for item in value]
    raise InvalidRequest("chat messages and tools may hold only JSON values", got=type(value).__name__)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML and sorts keys; templates were written for plain JSON.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"namespace attribute {name!r}")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
