"""Chat templates: what they may use, how they are cut, and what is refused in words."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from pdserve.chat_template import ChatTemplate
from pdserve.errors import InvalidRequest
from tests.support.virtual_clock import VirtualClock

USER = {"role": "user", "content": "hi"}
CHATML = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def render(source: str, messages: list[dict[str, Any]] | None = None, **options: Any) -> str:
    options.setdefault("add_generation_prompt", False)
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}, VirtualClock())
    return template.render(messages or [USER], **options)


def refusal(source: str, messages: list[dict[str, Any]] | None = None, **options: Any) -> str:
    with pytest.raises(InvalidRequest) as refused:
        render(source, messages, **options)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_whitespace_rules_are_those_that_templates_are_written_for() -> None:
    assert render("  {% if true %}\nx\n  {% endif %}\ny") == "x\ny"
    assert render("x\n") == "x"


def test_names_that_templates_expect() -> None:
    assert render("{{ bos_token }}{{ eos_token }}{{ pad_token }}") == "<s></s>"
    assert render("{{ tools is none }}{{ documents is none }}") == "TrueTrue"
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert (
        render(
            "{% set n = namespace(x=1) %}{% for i in range(3) %}{% set n.x = n.x + i %}{% endfor %}{{ n.x }}"
        )
        == "4"
    )
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}") == "hi"
    assert render("{{ dict(a=1).a }}{{ messages[0].missing is defined }}") == "1False"


def test_tojson_keeps_order_and_characters() -> None:
    tools = [{"name": "f", "a": "é<>&'"}]
    assert render("{{ tools | tojson }}", tools=tools) == '[{"name": "f", "a": "é<>&\'"}]'
    assert render("{{ tools[0] | tojson(indent=1) }}", tools=tools) == '{\n "name": "f",\n "a": "é<>&\'"\n}'


def test_the_date_comes_from_the_clock() -> None:
    wanted = datetime.fromtimestamp(VirtualClock().wall_ns() / 1e9).strftime("%d %B %Y")
    assert render("{{ strftime_now('%d %B %Y') }}") == wanted


def test_values_that_are_none_are_none() -> None:
    source = "{{ 'tool_calls' in messages[0] }}{{ messages[0].tool_calls is none }}{{ messages[0].name is defined }}"
    assert render(source, [{**USER, "tool_calls": None}]) == "TrueTrueFalse"


def test_a_template_may_refuse() -> None:
    source = "{% if messages[0].role != 'system' %}{{ raise_exception('system first') }}{% endif %}"
    assert "system first" in refusal(source)


def test_continuing_the_last_message() -> None:
    chat = [USER, {"role": "assistant", "content": "It is"}]
    got = render(CHATML, chat, continue_final_message=True)
    assert got == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nIt is"
    trimming = CHATML.replace("m.content", "m.content | trim")
    assert render(
        trimming, [USER, {"role": "assistant", "content": " It is  "}], continue_final_message=True
    ).endswith("assistant\nIt is")
    repeated = [USER, {"role": "assistant", "content": "hi"}]
    assert render(CHATML, repeated, continue_final_message=True).endswith("assistant\nhi")
    assert chat[-1]["content"] == "It is"


def test_what_cannot_be_continued() -> None:
    chat = [USER, {"role": "assistant", "content": "It is"}]
    assert "exclude each other" in refusal(
        CHATML, chat, continue_final_message=True, add_generation_prompt=True
    )
    assert "leaves out" in refusal("{{ messages[0].content }}", chat, continue_final_message=True)
    assert "needs text" in refusal(CHATML, [USER, {"role": "assistant"}], continue_final_message=True)


@pytest.mark.parametrize(
    ("messages", "named"),
    [([{"content": "x"}], "needs a role"), ([{"role": "", "content": "x"}], "needs a role"),
     ([{"role": "user", "content": object()}], "only JSON values")],
)  # fmt: skip
def test_bad_messages(messages: list[dict[str, Any]], named: str) -> None:
    assert named in refusal(CHATML, messages)


def test_no_messages() -> None:
    with pytest.raises(InvalidRequest, match="at least one"):
        ChatTemplate(CHATML, {}, VirtualClock()).render([])


@pytest.mark.parametrize("source", ["{% for %}", "{{ 1 +", "{% nonsense %}", "{% for a in b %}"])
def test_a_template_that_does_not_compile_is_told_when_it_is_used(source: str) -> None:
    assert "doesn't compile" in refusal(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% set n = namespace(__class__=1) %}",
        "{% set n = namespace() %}{% set n._x = 1 %}",
        "{{ messages[0].update(a=1) }}",
        "{{ messages[0].pop('role') }}",
        "{{ messages.sort() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__code__ }}",
        "{{ dict.__call__.__globals__ }}",
        "{{ dict.fromkeys.__func__.__globals__ }}",
        "{{ (messages | attr('__class__')).mro() }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ joiner.__init__.__globals__ }}",
        "{{ self._TemplateReference__context }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    assert "sandbox" in refusal(source)


def test_wrong_use_of_values_is_told() -> None:
    assert "refused the messages" in refusal("{{ messages[0].a.b }}")
    assert "refused the messages" in refusal("{{ 1 // 0 }}")
    assert "refused the messages" in refusal("{{ 'a' + 1 }}")
    assert "refused the messages" in refusal("{% include 'x' %}")


def test_what_holds_itself_is_written_short() -> None:
    assert render("{% set n = namespace() %}{% set n.a = n %}{{ n }}{{ [n] }}") == "<Namespace>[<Namespace>]"


def test_usual_formatting_is_not_touched() -> None:
    assert render(
        "{{ 'a'.center(5) }}|{{ 'a' | center(5) }}|{{ '%5.2f' % 2 }}|{{ '{:>{w}}'.format('x', w=3) }}"
    ) == ("  a  |  a  | 2.00|  x")
    assert (
        render("{{ 'a-b'.replace('-', '+') }}{{ ', '.join(['x', 'y']) }}{{ [1, 2] | join('+') }}")
        == "a+bx, y1+2"
    )
    assert render("{{ {'a': [1, (2, 3)]} | tojson(indent=1) | length }}{{ [[1], [2]] + [[3]] }}") == (
        "38[[1], [2], [3]]"
    )
    assert render("{% for a, b in [(1, messages[0].role)] %}{{ a ~ b }}{% endfor %}") == "1user"
    assert render("{% set a, b = messages[0].role, 2 %}{{ a }}{{ b }}{{ 'user' in (a, 'x') }}") == "user2True"
