"""Who watches a simulated cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tests.simulation.sim_worker import SimWorker


class Observer(Protocol):
    """Told of what happens; changes nothing."""

    def on_turn(self, worker: SimWorker) -> None:
        """The engine owner of a worker has taken in a message, or has had its turn."""
        ...

    def on_exit(self, worker: SimWorker, code: int) -> None:
        """A process has ended by itself."""
        ...

    def on_failure(self, worker: SimWorker, what: str) -> None:
        """A step, or a row of one, that was told to fail has failed: "step" or "row"."""
        ...

    def on_serving(self, router_id: str, serving: bool) -> None:
        """A router can serve requests, or can't any more."""
        ...

    def violate(self, what: str, about: str = "") -> None:
        """An invariant is broken. about: the request, if it is one's."""
        ...


class Unobserved:
    """Nobody looks, but what must never be still ends the run."""

    def on_turn(self, worker: SimWorker) -> None:
        pass

    def on_exit(self, worker: SimWorker, code: int) -> None:
        pass

    def on_failure(self, worker: SimWorker, what: str) -> None:
        pass

    def on_serving(self, router_id: str, serving: bool) -> None:
        pass

    def violate(self, what: str, about: str = "") -> None:
        raise AssertionError(what)
