"""Answers of an engine owner to routers: who is there to hear them, and how many were errors."""

from __future__ import annotations

import structlog

from pdserve.errors import PdserveError, to_failure
from pdserve.messages import Failed, Refused, Up
from pdserve.owner import Post
from pdserve.worker.messages import ToSession

log = structlog.get_logger()


class Replies:
    """The open sessions as the engine owner knows them. Engine owner only."""

    def __init__(self, to_loop: Post) -> None:
        self._to_loop = to_loop
        self._sessions: dict[int, str] = {}
        self._failures: dict[str, int] = {}
        self.num_ignored = 0

    def open(self, session_id: int, router_id: str) -> None:
        self._sessions[session_id] = router_id

    def close(self, session_id: int) -> None:
        """Idempotent."""
        self._sessions.pop(session_id, None)

    def __contains__(self, session_id: int) -> bool:
        return session_id in self._sessions

    def send(self, session_id: int, message: Up) -> None:
        """To one router; nothing if its session has ended."""
        if session_id in self._sessions:
            self._to_loop(ToSession(session_id, message))

    def fail(self, session_id: int, handle: int, error: PdserveError) -> None:
        """An attempt that had begun ended by an error."""
        self._note(error)
        self.send(session_id, Failed(handle, to_failure(error)))

    def refuse(self, session_id: int, handle: int, error: PdserveError) -> None:
        """An attempt will never begin."""
        self._note(error)
        log.info("attempt.refused", handle=handle, error=type(error).__name__, reason=str(error))
        self.send(session_id, Refused(handle, to_failure(error)))

    def ignore(self, event: str, **fields: object) -> None:
        """Something that a correct router doesn't send: counted, logged, not acted on."""
        self.num_ignored += 1
        log.warning(event, **fields)

    @property
    def failures(self) -> tuple[tuple[str, int], ...]:
        """Errors said so far, by class name."""
        return tuple(self._failures.items())

    def _note(self, error: PdserveError) -> None:
        name = type(error).__name__
        self._failures[name] = self._failures.get(name, 0) + 1
