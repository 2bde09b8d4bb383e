"""The session port: one ordered, two-way message stream between a worker and a router.

Implementations: gRPC (`pdserve.service.grpc_session`), and in simulations one inside the process. Both ends
of a session see the same interface; a worker's end sends `Up` and receives `Down`, a router's end the reverse.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from pdserve.errors import PdserveError

S_contra = TypeVar("S_contra", contravariant=True)
R_co = TypeVar("R_co", covariant=True)


class Session(Protocol, Generic[S_contra, R_co]):
    """Event-loop thread only."""

    @property
    def peer(self) -> str:
        """Address of the other side, for logs."""
        ...

    def send(self, message: S_contra) -> None:
        """Queue a message; never blocks. A closed session swallows it: its end tells both sides enough.

        The queue is bounded and merges (tokens per sequence; load keeps the newest); over the bound the session
        closes itself as a slow consumer.
        """
        ...

    def when_idle(self, source: Callable[[], S_contra | None]) -> Callable[[], None]:
        """Send what `source` gives whenever nothing else waits to be sent, until the session ends.

        source   the next message; None = nothing for now
        returns  what must be called when the source has something again
        """
        ...

    async def receive(self) -> R_co:
        """The next message, in order. Raises WorkerLost when the session has ended, Incompatible if the other side
        refused it as such. Anything else is a bug of this process, not the connection's doing."""
        ...

    def close(self, reason: str) -> None:
        """End the session now; idempotent. Messages not yet sent may be lost."""
        ...

    def refuse(self, error: PdserveError) -> None:
        """As `close`, with an error that the other side should learn: over gRPC it is the call's status."""
        ...
