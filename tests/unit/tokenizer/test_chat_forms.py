"""However a client writes a conversation, the template finds what it reads."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdserve.chat_template import ChatTemplate
from tests.support.virtual_clock import VirtualClock

OBJECT: dict[str, Any] = {"port": "Büsum", "days": [1]}
TEXT = json.dumps(OBJECT, ensure_ascii=False)
_LOOP = "{{% for m in messages %}}{{% for c in m.tool_calls or [] %}}{0}{{% endfor %}}{{% endfor %}}"
TEMPLATES = {
    "as JSON of an object": (_LOOP.format("{{ c.function.arguments | tojson }}"), TEXT),
    "by its items": (
        _LOOP.format("{% for k, v in c.function.arguments | items %}<{{ k }}>{{ v }}{% endfor %}"),
        "<port>Büsum<days>[1]",
    ),
    "as text": (_LOOP.format("{{ 'call ' + c.function.arguments }}"), f"call {TEXT}"),
    "as either": (
        _LOOP.format(
            "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}"
        ),
        TEXT,
    ),
    "where there is no content": (
        "{% for m in messages %}{% if m.content is none %}{{ m.tool_calls[0].function.arguments | tojson }}"
        "{% endif %}{% endfor %}",
        TEXT,
    ),
}  # fmt: skip


def render(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    template = ChatTemplate(source, {}, VirtualClock())
    return template.render(messages, add_generation_prompt=False, **options)


def call(arguments: Any) -> list[dict[str, Any]]:
    function = {"name": "tide", "arguments": arguments}
    return [
        {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}
    ]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("arguments", [OBJECT, TEXT], ids=["object", "text"])
def test_arguments_as_the_template_reads_them(name: str, arguments: Any) -> None:
    source, want = TEMPLATES[name]
    assert render(source, call(arguments)) == want


def test_text_that_a_template_writes_out_stays() -> None:
    assert render(_LOOP.format("{{ c.function.arguments }}"), call(TEXT)) == TEXT


@pytest.mark.parametrize("arguments", ["{broken", "[1]", "", None, 3])
def test_arguments_of_no_object_stay(arguments: Any) -> None:
    assert render(TEMPLATES["as JSON of an object"][0], call(arguments)) == json.dumps(arguments)


@pytest.mark.parametrize("calls", [[], [1], [{}], [{"function": None}], [{"function": {"name": "f"}}], "x"])
def test_calls_of_any_other_form_stay(calls: Any) -> None:
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    assert render("{{ messages[0].tool_calls | tojson }}", [message]) == json.dumps(calls)


NAMES = ("reasoning_content", "reasoning", "thinking")


@pytest.mark.parametrize("read", NAMES)
@pytest.mark.parametrize("written", NAMES)
def test_reasoning_under_any_name(read: str, written: str) -> None:
    message = {"role": "assistant", "content": "4.", written: "add them"}
    assert render(f"{{{{ messages[0].{read} }}}}", [message]) == "add them"


def test_reasoning_that_was_said_under_several_names_stays() -> None:
    message = {
        "role": "assistant",
        "content": "4.",
        "reasoning": "a",
        "thinking": "b",
        "reasoning_content": "",
    }
    source = "{{ messages[0].reasoning }}{{ messages[0].thinking }}{{ messages[0].reasoning_content }}"
    assert render(source, [message]) == "aba"
    assert render("{{ messages[0].thinking is defined }}", [{"role": "user", "content": ""}]) == "False"


def test_variables() -> None:
    source = "{{ enable_thinking is false }} {{ documents }} {{ messages | length }}"
    message = {"role": "user", "content": "hi"}
    assert render(source, [message], variables={"enable_thinking": False, "documents": [1]}) == "True [1] 1"
    assert render(source, [message]) == "False None 1"


@pytest.mark.parametrize(
    ("source", "want"),
    [
        ("{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% endfor %}", "<assistant>"),
        ("{% for m in messages %}{{ 'none' if m.content is none else m.content }}{% endfor %}", "none"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "None"),
    ],
    ids=["only text", "asks for null", "writes it out"],
)
def test_null_beside_calls_is_an_empty_text_only_where_the_template_takes_no_other(
    source: str, want: str
) -> None:
    assert render(source, call(OBJECT)) == want
    assert render(source, [{"role": "assistant", "content": "x"}])[-1] == "x"
