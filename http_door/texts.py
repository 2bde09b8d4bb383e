"""/tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

from typing import Any

import msgspec

from http_door.answer import Json, shown
from http_door.chat import chat_of
from http_door.errors import refused_field
from http_door.fields import NOT_GIVEN, is_given
from http_door.port import Visit
from pdserve.request import Chat, Limits


class TokenizeFields(msgspec.Struct, kw_only=True):
    """A text, or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    chat_template: msgspec.Raw = NOT_GIVEN
    mm_processor_kwargs: msgspec.Raw = NOT_GIVEN

    @property
    def source(self) -> str | Chat:
        """Raises HttpRefusal."""
        if (self.prompt is None) == (self.messages is None):
            raise refused_field("prompt", "want either prompt or messages")
        if self.add_special_tokens not in (None, self.messages is None):
            raise refused_field(
                "add_special_tokens", "add_special_tokens must be true for a prompt, false for messages"
            )
        for name in ("chat_template", "mm_processor_kwargs"):
            if is_given(getattr(self, name)):
                raise refused_field(name, f"{name} isn't supported")
        if self.messages is None:
            return self.prompt or ""
        return chat_of(
            self.messages,
            tools=self.tools,
            kwargs=self.chat_template_kwargs,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
        )


class DetokenizeFields(msgspec.Struct, kw_only=True):
    """Ids."""

    tokens: list[int]
    model: str | None = None


async def tokenize(body: TokenizeFields, visit: Visit) -> Json:
    """Ids, and how they are written if that was asked for."""
    ids = await visit.tokenize(body.source)
    strings = [shown(each) for each in await visit.token_bytes(ids)] if body.return_token_strs else None
    window = (await visit.model()).window_tokens
    return {"count": len(ids), "max_model_len": window, "tokens": ids, "token_strs": strings}


async def detokenize(body: DetokenizeFields, visit: Visit) -> Json:
    """Their text."""
    Limits().check_ids("tokens", body.tokens)
    return {"prompt": await visit.detokenize(body.tokens)}
