"""Starts on their way to the engine: one with a structure waits here until its matcher is made.

router ─► StartGate ──────────────────────────────────────────────► engine
             └─ has a structure ─► child ─► background ─► matcher ─┘

A child process shows first that it compiles within limits here, whatever the router's says: this machine may be slower.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from pdserve.children.frames import Proven
from pdserve.children.prover import Prove
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
from pdserve.worker.bugs import OnBug, ending_with
from pdserve.worker.messages import FromSession
from pdserve.worker.structures import WorkerStructures


class StartGate:
    """Loop only.

    prove    whether it compiles within limits
    forward  gives a message to the engine owner
    answer   sends a message to a router: (session id, message)
    on_bug   told of what is raised here when a proof or a matcher comes; one in making a matcher ends its request only
    num_failed  matchers that there won't be, by the class of the error
    """

    def __init__(
        self,
        structures: WorkerStructures,
        prove: Prove,
        background: Background,
        forward: Post,
        answer: Callable[[int, Up], None],
        on_bug: OnBug,
    ) -> None:
        self.num_failed: Counter[str] = Counter()
        self._structures = structures
        self._prove = prove
        self._background = background
        self._forward = forward
        self._answer = answer
        self._on_bug = on_bug
        self._held: dict[tuple[int, int], Callable[[], None]] = {}  # session, handle → give its proof up

    def take(self, received: FromSession, start: StartPrefill | StartDecode) -> None:
        """A start was read."""
        structure = start.key.params.structure
        if structure is None:
            self._forward(received)
            return
        key = received.session_id, start.handle
        self._held[key] = _nothing
        give_up = self._prove(
            structure, ending_with(lambda found: self._proven(received, start, found), self._on_bug)
        )
        if key in self._held:
            self._held[key] = give_up

    def drop(self, session_id: int, handle: int) -> None:
        """The router no longer wants it; the engine has not heard of it if it is still here."""
        self._held.pop((session_id, handle), _nothing)()

    def close(self, session_id: int) -> None:
        """The session has ended."""
        for key in [key for key in self._held if key[0] == session_id]:
            self._held.pop(key)()

    def refuse_all(self, error: PdserveError) -> None:
        """Give back what is here: the engine never hears of it."""
        held, self._held = self._held, {}
        for (session_id, handle), give_up in held.items():
            give_up()
            self._answer(session_id, Refused(handle, to_failure(error)))

    def _proven(
        self, received: FromSession, start: StartPrefill | StartDecode, found: Proven | PdserveError
    ) -> None:
        if isinstance(found, PdserveError):
            self._made(received, start, found)
        elif (received.session_id, start.handle) in self._held:
            self._background(
                lambda: self._structures.matcher(start, found.num_bytes),
                ending_with(lambda matcher: self._made(received, start, matcher), self._on_bug),
            )

    def _made(
        self, received: FromSession, start: StartPrefill | StartDecode, found: TokenMatcher | PdserveError
    ) -> None:
        key = (received.session_id, start.handle)
        if key not in self._held:
            return
        del self._held[key]
        if isinstance(found, PdserveError):
            self.num_failed[type(found).__name__] += 1
            self._answer(received.session_id, Refused(start.handle, to_failure(found)))
        else:
            self._forward(replace(received, matcher=found))


def _nothing() -> None:
    """Nothing is to be given up."""
