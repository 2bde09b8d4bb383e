"""Chats written by their model's template, in a child: the template is the operator's, the messages are strangers'."""

from __future__ import annotations

import hashlib
from typing import Protocol

from pdserve.children.frames import RenderChat, Rendered
from pdserve.children.lanes import Lanes
from pdserve.children.render import render_chat
from pdserve.errors import InvalidRequest


class ChatRenderer(Protocol):
    """Called on the event loop."""

    async def render(self, job: RenderChat, user: str) -> str:
        """The prompt text of a chat, in this user's turn. Raises InvalidRequest: what is wrong, or the limit."""
        ...


class InlineRenderer:
    """Here and at once: for simulations, where no time passes and nobody is hostile."""

    async def render(self, job: RenderChat, user: str) -> str:
        return render_chat(job).text


class ChildRenderer:
    """Nothing is remembered but what passed a limit."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes

    async def render(self, job: RenderChat, user: str) -> str:
        content = hashlib.blake2b(job.chat.encode(), digest_size=16).digest()
        try:
            rendered = await self._lanes.run((job.template, content), "the chat template", job, user)
        except UnicodeEncodeError as error:  # the messages were made ASCII
            raise InvalidRequest("the model's chat template is not valid Unicode") from error
        assert isinstance(rendered, Rendered), "the answer to this job"
        return rendered.text
