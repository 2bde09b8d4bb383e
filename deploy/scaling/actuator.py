"""What carries a decision out: child processes of one supervisor, Ray actors, or Kubernetes objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from deploy.scaling.targets import Counts
from pdserve.messages import Role


class Actuator(Protocol):
    """Event-loop thread only. Methods raise PdserveError or OSError for what can't be done now; it is decided again
    after a cool-down, if it is still wanted then.
    """

    @property
    def counts(self) -> Counts:
        """Workers that it was last asked for, changed roles included; those of any age, ready or not."""
        ...

    async def scale(self, counts: Counts, victims: Mapping[Role, Sequence[str]]) -> None:
        """Have so many workers from now on; returns when that is under way, not when they are ready or gone.

        victims  by role: ids of ready workers in the order in which they may go, those with the least to do first.
                 Workers that aren't ready go before them. Whoever goes is drained, never killed.
        """
        ...

    async def set_role(self, worker_id: str, role: Role) -> None:
        """Let a worker drain and rejoin in another role; it keeps it if it has to be started again."""
        ...
