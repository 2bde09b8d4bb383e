"""Which of its tools a request lets the model call: what the template sees of them, and what the text must be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from http_door.errors import refused_field
from http_door.tools.calls import is_name
from http_door.tools.forced import forced_calls, forced_parser, form_of
from http_door.tools.formats import FORMATS, tool_parser
from http_door.tools.port import OutputParser
from pdserve.ids import Random
from pdserve.structure import Structure

_FALLBACK = "hermes"  # how a model that has no form of its own is made to write calls


class Function(msgspec.Struct, kw_only=True):
    """OpenAI's."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatTool(msgspec.Struct, kw_only=True):
    """A chat's: only functions."""

    type: str
    function: Function | None = None


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """What a request asks, and what follows of it.

    style       a name of FORMATS; "" = no calls are looked for
    functions   that may be called: parameters by name
    demands     the model must call
    is_one      at most one call counts
    """

    style: str = ""
    functions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    demands: bool = False
    is_one: bool = False

    @property
    def is_made(self) -> bool:
        """Whether the model may call anything: else it isn't told of tools."""
        return bool(self.style)

    @property
    def structure(self) -> Structure | None:
        """What the text must be."""
        if not self.demands:
            return None
        return forced_calls(form_of(self.style), self.functions, is_one=self.is_one)

    @property
    def needs_special_tokens(self) -> bool:
        """Whether calls can be told only from a text that shows them."""
        return bool(self.style) and not self.demands and FORMATS[self.style].special_marks

    def parser(self, random: Random) -> OutputParser | None:
        """For one choice; None = nothing is looked for."""
        if not self.style:
            return None
        style, names = FORMATS[self.style], tuple(self.functions)
        if self.demands:
            return forced_parser(form_of(self.style), style, names, random)
        return tool_parser(style, names, random, most_calls=1 if self.is_one else None)


def read_choice(
    functions: Sequence[Function], choice: str | None, named: str | None, *, parallel: bool | None, style: str
) -> ToolChoice:
    """Of a request's tools, in whichever form the endpoint has them.

    choice  none, auto or required; None = auto if there are tools
    named   the one function that must be called, or None
    style   the model's format, or ""
    Raises HttpRefusal.
    """
    by_name = _by_name(functions)
    if not by_name:
        if choice not in (None, "auto", "none") or named is not None:
            raise refused_field("tool_choice", "tool_choice needs tools")
        return ToolChoice()
    if named is not None:
        if named not in by_name:
            raise refused_field("tool_choice", "tool_choice names none of the tools", got=named[:80])
        return ToolChoice(style or _FALLBACK, {named: by_name[named]}, demands=True, is_one=True)
    is_one = parallel is False
    match choice:
        case "none":
            return ToolChoice()
        case "required":
            return ToolChoice(style or _FALLBACK, by_name, demands=True, is_one=is_one)
        case None | "auto":
            if not style:
                raise refused_field(
                    "tools",
                    "this model's chat template has no form of tool calls that is known: set tool_choice to required"
                    " or to a function, or start the server with --tool-parser",
                )
            return ToolChoice(style, by_name, is_one=is_one)
    raise refused_field("tool_choice", "tool_choice is none, auto, required or a function", got=choice[:80])


def chat_functions(tools: Sequence[Mapping[str, Any]] | None) -> list[Function]:
    """Of a chat's tools. Raises HttpRefusal that names the place."""
    found = []
    for place, given in enumerate(tools or ()):
        where = f"tools[{place}]"
        try:
            tool = msgspec.convert(given, ChatTool)
        except msgspec.ValidationError as error:
            raise refused_field(where, f"{where}: {error}") from None
        if tool.type != "function" or tool.function is None:
            raise refused_field(f"{where}.type", f"{where}.type must be function", value=tool.type[:80])
        found.append(tool.function)
    return found


def chat_choice(given: str | Mapping[str, Any] | None) -> tuple[str | None, str | None]:
    """A chat's tool_choice as `read_choice` has it: choice and named. Raises HttpRefusal."""
    if given is None or isinstance(given, str):
        return given, None
    function = given.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if given.get("type") != "function" or not isinstance(name, str):
        raise refused_field(
            "tool_choice", 'tool_choice as an object is {"type": "function", "function": {"name": …}}'
        )
    return None, name


def _by_name(functions: Sequence[Function]) -> dict[str, Mapping[str, Any]]:
    found: dict[str, Mapping[str, Any]] = {}
    for place, each in enumerate(functions):
        if not is_name(each.name):
            raise refused_field(
                f"tools[{place}]", "a function's name is letters, digits and _ - . : /", got=each.name[:80]
            )
        if each.name in found:
            raise refused_field(f"tools[{place}]", "two functions have one name", got=each.name)
        found[each.name] = each.parameters or {}
    return found
