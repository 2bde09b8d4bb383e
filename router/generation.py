"""What a caller holds of a running request: its events, in order, and the right to stop it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from pdserve.errors import RequestCancelled
from pdserve.request import Event
from router.conductor import Conductor


class Generation:
    """Async iterator over the events of one request; raises what the request ended with. Event-loop thread only."""

    def __init__(self, conductor: Conductor) -> None:
        self._conductor = conductor

    @property
    def on_stalled(self) -> Callable[[], None]:
        """Called when the client is given up because it doesn't read; may be set."""
        return self._conductor.on_stalled

    @on_stalled.setter
    def on_stalled(self, callback: Callable[[], None]) -> None:
        self._conductor.on_stalled = callback

    @property
    def request_id(self) -> str:
        return self._conductor.request_id

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        event = await self._conductor.output.take(self._conductor.on_taken)
        if event is None:
            raise StopAsyncIteration
        return event

    def close(self) -> None:
        """The client is gone: nothing more is computed for it. Idempotent; no effect after the end."""
        self._conductor.cancel(RequestCancelled("the client went away"))
        self._conductor.output.close()
