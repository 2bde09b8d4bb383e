"""Starts on their way to the engine: one with a structure waits here until its matcher is made.

router ─► StartGate ──────────────────────────────────► engine
             └─ has a structure ─► background ─► matcher ┘
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pdserve.errors import PdserveError, to_failure
from pdserve.messages import (
    Refused,
    StartDecode,
    StartPrefill,
    Up,
)
from pdserve.owner import Post
from pdserve.token_matcher import TokenMatcher
from pdserve.worker.background import Background
from pdserve.worker.messages import FromSession
from pdserve.worker.structures import WorkerStructures


class StartGate:
    """Loop only.

    forward  gives a message to the engine owner
    answer   sends a message to a router: (session id, message)
    """

    def __init__(
        self,
        structures: WorkerStructures,
        background: Background,
        forward: Post,
        answer: Callable[[int, Up], None],
    ) -> None:
        self._structures = structures
        self._background = background
        self._forward = forward
        self._answer = answer
        self._held: dict[tuple[int, int], None] = {}

    def take(self, received: FromSession, start: StartPrefill | StartDecode) -> None:
        """A start was read."""
        if start.key.params.structure is None:
            self._forward(received)
            return
        self._held[received.session_id, start.handle] = None
        self._background(
            lambda: self._structures.matcher(start), lambda found: self._made(received, start, found)
        )

    def drop(self, session_id: int, handle: int) -> None:
        """The router wants it no more; the engine has not heard of it if it is still here."""
        self._held.pop((session_id, handle), None)

    def close(self, session_id: int) -> None:
        """The session has ended."""
        for key in [key for key in self._held if key[0] == session_id]:
            del self._held[key]

    def refuse_all(self, error: PdserveError) -> None:
        """Give back what is here: the engine never hears of it."""
        held, self._held = self._held, {}
        for session_id, handle in held:
            self._answer(session_id, Refused(handle, to_failure(error)))

    def _made(
        self, received: FromSession, start: StartPrefill | StartDecode, found: TokenMatcher | PdserveError
    ) -> None:
        key = (received.session_id, start.handle)
        if key not in self._held:
            return
        del self._held[key]
        if isinstance(found, PdserveError):
            self._answer(received.session_id, Refused(start.handle, to_failure(found)))
        else:
            self._forward(replace(received, matcher=found))
