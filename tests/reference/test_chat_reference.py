"""Chats rendered by templates of many models' styles equal transformers', and what it refuses is refused."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.chat_template import ChatTemplate
from pdserve.errors import InvalidRequest
from tests.support.virtual_clock import VirtualClock

TEMPLATES = {
    # ChatML with a default system message and tools as JSON lines; results of tools are grouped into one turn
    "chatml with tools": """
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}
    {%- else %}{{- 'Be helpful.\n\n' }}{% endif %}
    {{- "You may call:\n<tools>" }}
    {%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\n</tools><|im_end|>\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{- '\n' + message.content }}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function if call.function is defined else call %}
            {{- '\n<tool_call>\n{"name": "' ~ call.name ~ '", "arguments": ' ~ (call.arguments | tojson) }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != "tool" %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
""",
    "headers": """
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system_message = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{%- if tools is not none %}{%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\n\n" }}{%- endfor %}{%- endif %}
{{- system_message }}{{- "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}
""",
    "alternating": """
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}{%- set loop_messages = messages[1:] %}{%- set system = messages[0].content %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {%- if loop.first and system is defined %}{{- ' [INST] ' + system + '\n\n' + message['content'] + ' [/INST]' }}
        {%- else %}{{- ' [INST] ' + message['content'] + ' [/INST]' }}{%- endif %}
    {%- elif message['role'] == 'assistant' %}{{- ' ' + message['content'] + eos_token }}
    {%- else %}{{- raise_exception('only user and assistant roles') }}{%- endif %}
{%- endfor %}
""",
    "turns": """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}{%- set prefix = messages[0]['content'] + '\n\n' -%}
    {%- else -%}{%- set prefix = messages[0]['content'][0]['text'] + '\n\n' -%}{%- endif -%}
    {%- set rest = messages[1:] -%}
{%- else -%}{%- set prefix = "" -%}{%- set rest = messages -%}{%- endif -%}
{%- for message in rest -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\n' + (prefix if loop.first else "") }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}{{ '<image>' }}
            {%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- else -%}{{ raise_exception("Invalid content type") }}{%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}
""",
    "marked": """{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}
{{ message.content }}{{ eos_token }}
{% endgeneration %}{% else %}
<|{{ message.role }}|>
{{ message.content }}
{% endif %}{% endfor %}
{% if add_generation_prompt %}<|assistant|>
{% endif %}""",
    "all kinds of features": """
{%- macro show(value, depth=0) -%}
    {%- if value is mapping -%}
        {%- for key, item in value | dictsort -%}
            {{ '  ' * depth }}{{ key }}: {{ show(item, depth + 1) }}{{ '\n' }}
        {%- endfor -%}
    {%- elif value is sequence and value is not string -%}[{{ value | map('string') | join(', ') }}]
    {%- else -%}{{ value | string | upper }}{%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(count=0, last=none) -%}
{%- for message in messages -%}
    {%- if message.role == 'system' -%}{%- continue -%}{%- endif -%}
    {%- set ns.count = ns.count + 1 -%}{%- set ns.last = message -%}
    {%- if ns.count > 3 -%}{%- break -%}{%- endif -%}
    {{ "%d/%s " | format(ns.count, message.role) }}{{ show(message) }}
{%- endfor -%}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }}
{{- ns.last.content.split('\n')[-1].strip() if ns.last.content is string else 'parts' }}
{{- dict.fromkeys(['a', 'b'], 1) | tojson }}{{ dict(x=1) | items | list }}
{{- messages[::-1] | map(attribute='role') | unique | join('|') }}{{ tools | default([], true) | length }}
{{- (messages | first).role.startswith('us') }}{{ 7 // 2 }}{{ 2 ** 3 }}{{ '%.2f' % 0.5 }}
""",
}  # fmt: skip

SYSTEM = {"role": "system", "content": "  You answer in one word. "}
USER = {"role": "user", "content": "  What is 2 + 2?\nShow `code` & <tags>: 🧮  "}
ANSWER = {"role": "assistant", "content": "Four. "}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"type": "function", "function": {"name": "add", "arguments": {"b": "ß<>", "a": [1, 2.5, None]}}}
    ],
}
RESULT = {"role": "tool", "name": "add", "content": '{"sum": 4}'}
PARTS = {
    "role": "user",
    "content": [{"type": "image"}, {"type": "text", "text": " two "}, {"type": "text", "text": "x"}],
}
CHATS: dict[str, list[dict[str, Any]]] = {
    "user": [USER],
    "system": [SYSTEM, USER],
    "turns": [SYSTEM, USER, ANSWER, {"role": "user", "content": "Why? 为什么?"}],
    "system late": [USER, ANSWER, SYSTEM, USER],
    "twice": [USER, USER],
    "tool": [SYSTEM, USER, CALL, RESULT, RESULT, ANSWER],
    "parts": [SYSTEM, PARTS],
    "empty": [{"role": "user", "content": ""}],
    "long": [USER, ANSWER] * 60 + [USER],
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds <numbers> & \"strings\" – 'all'",
            "parameters": {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "array"}}},
        },
    }
]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def theirs(source: str, chat: list[dict[str, Any]], tools: Any, **options: Any) -> str | None:
    """What transformers renders; None if it refuses."""
    from jinja2 import TemplateError
    from transformers.utils import chat_template_utils

    render: Any = chat_template_utils.render_jinja_template
    try:
        rendered, _ = render([chat], tools=tools, chat_template=source, **options, **SPECIAL)
    except (TemplateError, TypeError, ValueError, AttributeError):
        return None
    return str(rendered[0])


def theirs_or_empty(source: str, chat: list[dict[str, Any]], tools: Any, **options: Any) -> str | None:
    """The same; where it refuses null for the text of a message that only calls tools, with an empty text."""
    found = theirs(source, chat, tools, **options)
    if found is not None:
        return found
    texts = [
        {**each, "content": ""} if each.get("content", "") is None and each.get("tool_calls") else each
        for each in chat
    ]
    return theirs(source, texts, tools, **options)


def ours(source: str, chat: list[dict[str, Any]], tools: Any, **options: Any) -> str | None:
    try:
        return ChatTemplate(source, SPECIAL, VirtualClock()).render(chat, tools, **options)
    except InvalidRequest:
        return None


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_rendered_chats_are_equal(name: str, tools: Any) -> None:
    answered = 0
    for chat in CHATS.values():
        for prompt in (False, True):
            want = theirs_or_empty(TEMPLATES[name], chat, tools, add_generation_prompt=prompt)
            assert ours(TEMPLATES[name], chat, tools, add_generation_prompt=prompt) == want
            answered += want is not None
    assert answered >= 6


OPEN = {"add_generation_prompt": False, "continue_final_message": True}


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "all kinds of features"])
@pytest.mark.parametrize(
    "final",
    [
        {"role": "assistant", "content": "It is fo"},
        {"role": "assistant", "content": " It is  "},
        {"role": "assistant", "content": "Four. "},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "Tell me"},
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": [{"type": "image"}]},
        {"role": "assistant"},
    ],
)
def test_continued_chats_are_equal(name: str, final: dict[str, Any]) -> None:
    for chat in ([USER, final], [SYSTEM, USER, ANSWER, USER, final]):
        want = theirs(TEMPLATES[name], chat, None, continue_final_message=True)
        assert ours(TEMPLATES[name], chat, None, **OPEN) == want


def test_the_last_text_of_several_parts_is_continued() -> None:
    final = {
        "role": "assistant",
        "content": [{"type": "text", "text": "It"}, {"type": "text", "text": "is fo"}],
    }
    chat: list[dict[str, Any]] = [USER, final]
    got = ours(TEMPLATES["turns"], chat, None, **OPEN)
    assert got == theirs(TEMPLATES["turns"], chat, None, continue_final_message=True)
    assert got is not None and got.endswith("<start_of_turn>model\nItis fo")
    # A template that knows no parts would show them as Python writes them: refused here.
    assert ours(TEMPLATES["marked"], chat, None, **OPEN) is None
