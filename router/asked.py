"""One request as its client asked it: what all that is done for it goes by."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.clock import Clock
from pdserve.ids import AttemptName
from pdserve.request import GenerateRequest
from pdserve.tracing import Trace
from router.callers import Caller


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Asked:
    """received_s and deadline_s are moments of the router's clock; traceparent is the client's, for logs.

    above, place  of a request that is traced: where its span belongs, and that span
    asker  whose turn it takes while its texts are read
    only   (prefill id, decode id) that alone may serve it; None = any
    """

    caller: Caller
    request: GenerateRequest
    request_id: str
    asker: str
    traceparent: str
    received_s: float
    deadline_s: float
    clock: Clock
    only: tuple[str, str] | None = None
    above: Trace | None = None
    place: Trace | None = None

    @property
    def user(self) -> str:
        """Whose turn in the queue it takes: where there are tenants, theirs."""
        return self.caller.tenant or self.request.user

    @property
    def cache_salt(self) -> str:
        """Prefix cache entries are shared between equal ones."""
        return self.caller.salt(self.request.cache_salt)

    def left_s(self) -> float:
        """Seconds that the client still gives."""
        return max(0.0, self.deadline_s - self.clock.now_s())

    def name(self, choice: int, attempt: int) -> AttemptName:
        """Of an attempt, as users count them, from 1."""
        return AttemptName(self.request_id, choice, attempt, self.traceparent)
