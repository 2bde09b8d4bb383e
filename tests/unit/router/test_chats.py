"""What of a request's chat reaches the model's template."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from pdserve.chat import Chat, ChatMessage, chat_from_proto, chat_to_proto, check_chat
from pdserve.children.renderer import InlineRenderer
from pdserve.clock import SystemClock
from pdserve.errors import InvalidRequest
from pdserve.request import Limits
from pdserve.tokenizer import Tokenizer
from router.metrics import RouterMetrics
from router.model_text import ModelText
from router.turns import Turns
from router.work import InlineWork

_SHOWS_ALL = (
    "{% for message in messages %}{{ message | tojson(sort_keys=true) }}\n{% endfor %}"
    "tools={{ tools | tojson }} {{ '<|assistant|>' if add_generation_prompt }}"
)
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALLS = [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}]
REASONING = ("reasoning_content", "reasoning", "thinking")
USER = ChatMessage("user", "2 + 2?")
CALL = ChatMessage("assistant", "", json.dumps({"tool_calls": CALLS, "reasoning_content": "hm"}))
RESULT = ChatMessage("tool", "4", json.dumps({"tool_call_id": "c1", "name": "add"}))


async def encoded(tokenizer: Tokenizer, chat: Chat) -> tuple[int, ...]:
    """By a router's way."""
    work = InlineWork()
    turns = Turns(work, SystemClock(), RouterMetrics(CollectorRegistry()), 1 << 20)
    return await ModelText(work, turns, InlineRenderer()).encode(tokenizer, chat, Limits(), user="")


async def rendered(chat: Chat) -> tuple[list[dict[str, Any]], str]:
    """The messages as a template sees them, and what stands behind them."""
    files = {**Tokenizer.fake().files, "chat_template.jinja": _SHOWS_ALL.encode()}
    tokenizer = Tokenizer.from_files(files)
    sent = chat_from_proto(chat_to_proto(chat))
    check_chat(sent)
    ids = await encoded(tokenizer, sent)
    *lines, rest = tokenizer.decode(ids).split("\n")
    return [json.loads(line) for line in lines], rest


async def test_tools_calls_and_results_reach_the_template() -> None:
    messages, rest = await rendered(Chat((USER, CALL, RESULT), json.dumps(TOOLS)))
    assert messages == [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "", "tool_calls": CALLS, **dict.fromkeys(REASONING, "hm")},
        {"role": "tool", "content": "4", "tool_call_id": "c1", "name": "add"},
    ]
    assert rest == f"tools={json.dumps(TOOLS)} <|assistant|>"


@pytest.mark.parametrize(("given", "want"), [(None, True), (True, True), (False, False)])
async def test_the_assistants_turn_is_opened_unless_it_shall_not(given: bool | None, want: bool) -> None:
    _, rest = await rendered(Chat((USER,), add_generation_prompt=given))
    assert rest.endswith("<|assistant|>") is want


async def test_a_message_that_is_continued_opens_no_turn() -> None:
    chat = Chat((USER, ChatMessage("assistant", "It is")), continue_final_message=True)
    assert not chat.opens_turn
    text = await encoded(Tokenizer.fake(), chat)
    assert bytes(text).endswith(b"<|assistant|>It is")


@pytest.mark.parametrize(("depth", "fits"), [(98, True), (900, False), (60_000, False)])
@pytest.mark.parametrize("field", ["tools", "message"])
async def test_what_is_nested_too_deep_is_refused(field: str, depth: int, fits: bool) -> None:
    nested = "[" * depth + "]" * depth
    if field == "tools":
        chat = Chat((USER,), nested)
    else:
        chat = Chat((ChatMessage("user", "hi", f'{{"a": {nested}}}'),))
    if fits:
        assert await rendered(chat)
    else:
        with pytest.raises(InvalidRequest, match=r"nested too deep \(limit=100\)|must be a JSON"):
            await rendered(chat)


async def test_content_may_be_null_and_variables_reach_the_template() -> None:
    files = {
        **Tokenizer.fake().files,
        "chat_template.jinja": b"{{ messages[-1].content is none }} {{ enable_thinking }} {{ style }}",
    }
    call = ChatMessage("assistant", "", json.dumps({"content": None, "tool_calls": CALLS}))
    chat = Chat((USER, call), template_kwargs_json='{"enable_thinking": false, "style": "terse"}')
    sent = chat_from_proto(chat_to_proto(chat))
    check_chat(sent)
    ids = await encoded(Tokenizer.from_files(files), sent)
    assert bytes(ids) == b"True False terse"


@pytest.mark.parametrize("text", ["[]", "{", '{"messages": []}', '{"tools": 1}', '{"_x": 1}', '{"a b": 1}'])
def test_variables_that_cannot_be_set(text: str) -> None:
    with pytest.raises(InvalidRequest, match="template_kwargs_json"):
        check_chat(Chat((USER,), template_kwargs_json=text))


async def test_special_tokens_of_users_are_text_unless_the_request_says_otherwise() -> None:
    tokenizer = Tokenizer.fake()
    said = Chat(
        (ChatMessage("system", "<|eos|>"), ChatMessage("user", "a<|eos|>b"), ChatMessage("tool", "<|eos|>"))
    )
    ids = await encoded(tokenizer, said)
    assert ids.count(256) == 1 and b"a<|eos|>b\n<|tool|><|eos|>" in bytes(each for each in ids if each < 256)
    parsed = await encoded(tokenizer, replace(said, parse_special_tokens=True))
    assert parsed.count(256) == 3


async def test_a_chat_without_a_template_is_refused() -> None:
    files = {name: each for name, each in Tokenizer.fake().files.items() if name != "chat_template.jinja"}
    with pytest.raises(InvalidRequest, match="no chat template"):
        await encoded(Tokenizer.from_files(files), Chat((USER,)))
