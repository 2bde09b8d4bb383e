"""Conversations as requests carry them: for the model's own template, which decides what of them it reads."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from pdserve.errors import InvalidRequest, too_large
from pdserve.fields import check_unicode
from pdserve.rpc.codec import compile_converter
from pdserve.rpc.v1 import inference_pb2 as pb

MAX_MESSAGES = 16384
MAX_JSON_MARKS = 65536  # values, about; all JSON of a chat
ROLES = ("system", "developer", "user", "assistant", "tool")

RESERVED_KWARGS = ("messages", "tools", "add_generation_prompt", "continue_final_message")  # have fields


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation.

    extra_json  a JSON object of what else the template reads: tool_calls, tool_call_id, name, …; or empty. With
                "content": null in it, and an empty content, the template sees none
    """

    role: str
    content: str
    extra_json: str = ""

    def as_template_sees_it(self) -> dict[str, Any]:
        """All its fields."""
        extra: dict[str, Any] = json.loads(self.extra_json) if self.extra_json else {}
        return {"role": self.role, "content": self.content, **extra}


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation for the model's own template.

    tools_json             a JSON list, or empty
    add_generation_prompt  open the assistant's turn; None = unless the last message is continued
    template_kwargs_json   a JSON object of what else the template reads, e.g. enable_thinking; or empty
    parse_special_tokens   special tokens that a user or a tool has written count as such; else they are text
    """

    messages: tuple[ChatMessage, ...]
    tools_json: str = ""
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None
    template_kwargs_json: str = ""
    parse_special_tokens: bool = False

    @property
    def num_characters(self) -> int:
        """Of all that its sender has written."""
        told = sum(len(message.content) + len(message.extra_json) for message in self.messages)
        return told + len(self.tools_json) + len(self.template_kwargs_json)

    @property
    def opens_turn(self) -> bool:
        """Whether the prompt ends with the head of the assistant's turn."""
        given = self.add_generation_prompt
        return not self.continue_final_message if given is None else given


_CHAT = compile_converter(Chat, pb.Chat)
chat_to_proto = _CHAT.write


def chat_from_proto(msg: pb.Chat) -> Chat:
    """Raises InvalidRequest for too many messages, before any is read; the other rules are `check_chat`'s."""
    _check_count(len(msg.messages))
    return _CHAT.read(msg)


def check_chat(chat: Chat) -> None:
    """Raises InvalidRequest for no messages, an unknown role, JSON of another kind, a bad continuation."""
    _check_count(len(chat.messages))
    _check_json_size(chat)
    for place, each in enumerate(chat.messages):
        if each.role not in ROLES:
            raise InvalidRequest(
                "unknown chat role", message_index=place, role=each.role[:80], known=", ".join(ROLES)
            )
        check_unicode(f"messages[{place}].content", each.content)
        _check_extra(place, each)
    if chat.continue_final_message and chat.messages[-1].role != "assistant":
        raise InvalidRequest(
            "continue_final_message needs a last message of the assistant", role=chat.messages[-1].role
        )
    if chat.add_generation_prompt and chat.continue_final_message:
        raise InvalidRequest("continue_final_message and add_generation_prompt exclude each other")
    check_unicode("tools_json", chat.tools_json)
    if chat.tools_json and not isinstance(_json_of(chat.tools_json), list):
        raise InvalidRequest("tools_json must be a JSON list", value=chat.tools_json[:80])
    _check_kwargs(chat.template_kwargs_json)


def read_chat(chat: Chat) -> tuple[list[dict[str, Any]], Any, Any]:
    """Messages, tools and variables as the template sees them; of a chat that was checked."""
    messages = [message.as_template_sees_it() for message in chat.messages]
    tools = json.loads(chat.tools_json) if chat.tools_json else None
    variables = json.loads(chat.template_kwargs_json) if chat.template_kwargs_json else None
    return messages, tools, variables


def _check_count(num_messages: int) -> None:
    if not 1 <= num_messages <= MAX_MESSAGES:
        raise too_large(
            "messages",
            "number of chat messages out of range",
            limit=f"1 to {MAX_MESSAGES}",
            value=num_messages,
        )


def _check_json_size(chat: Chat) -> None:
    """By the characters that stand between values, which are quickly counted. (Some may stand in texts.)"""
    written = [chat.tools_json, chat.template_kwargs_json, *[each.extra_json for each in chat.messages]]
    num_marks = sum(text.count(mark) for text in written if text for mark in ",:[{")
    if num_marks > MAX_JSON_MARKS:
        raise too_large(
            "json",
            "the chat's JSON fields hold too much",
            limit=f"{MAX_JSON_MARKS} of , : [ and {{",
            value=num_marks,
        )


def _check_extra(place: int, message: ChatMessage) -> None:
    text = message.extra_json
    check_unicode(f"messages[{place}].extra_json", text)
    extra = _json_of(text) if text else {}
    if not isinstance(extra, dict):
        raise InvalidRequest("extra_json must be a JSON object", message_index=place, value=text[:80])
    if "role" in extra:
        raise InvalidRequest("extra_json must not hold role: it has a field", message_index=place)
    if "content" in extra and (extra["content"] is not None or message.content):
        raise InvalidRequest(
            "extra_json must not hold content: it has a field; null is allowed where that is empty",
            message_index=place,
        )


def _check_kwargs(text: str) -> None:
    check_unicode("template_kwargs_json", text)
    kwargs = _json_of(text) if text else {}
    if not isinstance(kwargs, dict):
        raise InvalidRequest("template_kwargs_json must be a JSON object", value=text[:80])
    for name in kwargs:
        if name in RESERVED_KWARGS or not name.isidentifier() or name.startswith("_"):
            raise InvalidRequest("template_kwargs_json can't set this name", name=name[:80])


def _json_of(text: str) -> object:
    """None if it isn't JSON."""
    try:
        found: object = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found
