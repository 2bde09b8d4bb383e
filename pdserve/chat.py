"""Conversations as requests carry them: for the model's own template, which decides what of them it reads."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from pdserve.errors import InvalidRequest
from pdserve.rpc.made import made
from pdserve.rpc.v1 import inference_pb2 as pb

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation.

    extra_json  a JSON object of what else the template reads: tool_calls, tool_call_id, name, …; or empty
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
    """

    messages: tuple[ChatMessage, ...]
    tools_json: str = ""
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None

    @property
    def opens_turn(self) -> bool:
        """Whether the prompt ends with the head of the assistant's turn."""
        given = self.add_generation_prompt
        return not self.continue_final_message if given is None else given


def chat_to_proto(chat: Chat) -> pb.Chat:
    """The client's side. Raises InvalidRequest for what no message can hold."""
    return made(
        pb.Chat,
        messages=[
            made(pb.ChatMessage, role=each.role, content=each.content, extra_json=each.extra_json)
            for each in chat.messages
        ],
        tools_json=chat.tools_json,
        continue_final_message=chat.continue_final_message,
        add_generation_prompt=chat.add_generation_prompt,
    )


def chat_from_proto(msg: pb.Chat) -> Chat:
    """Raises InvalidRequest for no messages, an unknown role, JSON of another kind, a bad continuation."""
    if not msg.messages:
        raise InvalidRequest("a chat needs at least one message")
    for place, each in enumerate(msg.messages):
        if each.role not in ROLES:
            raise InvalidRequest(
                "unknown chat role", message_index=place, role=each.role[:80], known=", ".join(ROLES)
            )
        _check_extra(place, each.extra_json)
    if msg.continue_final_message and msg.messages[-1].role != "assistant":
        raise InvalidRequest(
            "continue_final_message wants a last message of the assistant", role=msg.messages[-1].role
        )
    opens = msg.add_generation_prompt if msg.HasField("add_generation_prompt") else None
    if opens and msg.continue_final_message:
        raise InvalidRequest("continue_final_message and add_generation_prompt exclude each other")
    if msg.tools_json and not isinstance(_json_of(msg.tools_json), list):
        raise InvalidRequest("tools_json must be a JSON list", value=msg.tools_json[:80])
    messages = tuple(ChatMessage(each.role, each.content, each.extra_json) for each in msg.messages)
    return Chat(messages, msg.tools_json, msg.continue_final_message, opens)


def _check_extra(place: int, text: str) -> None:
    extra = _json_of(text) if text else {}
    if not isinstance(extra, dict):
        raise InvalidRequest("extra_json must be a JSON object", message_index=place, value=text[:80])
    for name in ("role", "content"):
        if name in extra:
            raise InvalidRequest(f"extra_json must not hold {name}: it has a field", message_index=place)


def _json_of(text: str) -> object:
    """None for what is no JSON."""
    try:
        found: object = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found
