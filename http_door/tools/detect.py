"""Which format a model writes, by what its chat template holds."""

from __future__ import annotations

import re
from collections.abc import Mapping

# A format, what its templates hold, and what those of others hold that look alike. The first that fits.
_SIGNS = (
    ("gemma", r"<start_function_call>|<\|tool_call>", None),
    ("mistral", r"\[TOOL_CALLS\]", None),
    ("phi4", r"<\|tool\|>|<\|tool_call\|>", None),
    ("pythonic", r"<\|python_start\|>|\[func_name1\(", None),
    ("llama3_json", r"<\|python_tag\|>|\{\\?\"name\\?\": function name, \\?\"parameters\\?\":", None),
    ("hermes", r"<tool_call>", r"<function=|<arg_key>"),
)
_REASONING_SIGNS = (("mistral", r"\[THINK\]"), ("think", r"</?think>"))


def parsers_of(templates: Mapping[str, str]) -> dict[str, str]:
    """Of a model's templates by name: what `ModelInfo` tells."""
    template = templates.get("tool_use") or templates.get("default") or ""
    return {
        "tool_parser": tool_format_of(template),
        "reasoning_parser": reasoning_format_of(template),
    }


def tool_format_of(template: str) -> str:
    """A name of FORMATS; "" = the template writes no calls, or in no form that is known."""
    for name, sign, not_with in _SIGNS:
        if re.search(sign, template) and not (not_with and re.search(not_with, template)):
            return name
    return ""


def reasoning_format_of(template: str) -> str:
    """A name of REASONING; "" = the template knows of none."""
    return next((name for name, sign in _REASONING_SIGNS if re.search(sign, template)), "")
