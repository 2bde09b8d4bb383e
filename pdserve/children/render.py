"""What a child does with a chat: compile its template, unless it is the last one's, and write the conversation."""

from __future__ import annotations

import functools
import json

from pdserve.chat_template import ChatTemplate
from pdserve.children.frames import RenderChat, Rendered
from pdserve.clock import SystemClock
from pdserve.errors import InvalidRequest

MAX_TEXT_BYTES = 16 << 20  # no window holds so much
_KEPT_TEMPLATES = 8


def render_chat(job: RenderChat) -> Rendered:
    """Raises InvalidRequest as `ChatTemplate.render`, and for a text that is too long."""
    template = _compiled(job.template, tuple(job.special_tokens.items()))
    text = template.render(**json.loads(job.chat))
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequest("text is not valid Unicode") from error
    if num_bytes > MAX_TEXT_BYTES:
        raise InvalidRequest("the chat template writes too much text", limit=MAX_TEXT_BYTES, value=num_bytes)
    return Rendered(text)


@functools.lru_cache(_KEPT_TEMPLATES)
def _compiled(source: str, special_tokens: tuple[tuple[str, str], ...]) -> ChatTemplate:
    return ChatTemplate(source, dict(special_tokens), SystemClock())
