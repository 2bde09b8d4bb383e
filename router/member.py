"""One live session of one worker, as the router knows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from pdserve.errors import PdserveError
from pdserve.ids import WorkerRef
from pdserve.messages import Abort, AttemptMessage, Down, Hello, Role, StepTokens, Up
from pdserve.session import Session
from router.accounting import Accounting, Credit
from router.fitted_lines import Line, WorkerFits
from router.liveness import Liveness
from router.prefix_index import PrefixIndex


class Leg(Protocol):
    """What runs on a worker under one handle: the receiver of its messages."""

    def on_message(self, member: Member, message: AttemptMessage | StepTokens) -> None: ...

    def on_session_lost(self, member: Member, error: PdserveError) -> None: ...


ORDERED = "ordered"


@dataclass(slots=True)
class PairRecord:
    """One ordered pair, seen from its prefill worker."""

    decode: WorkerRef
    up: bool = False
    transport: str = ""
    reason: str = ORDERED
    generation: int = 0
    asked_s: float = 0.0
    handover: Line = field(default_factory=Line)  # tokens sent → what the transfer takes beyond the prefill

    @property
    def undecided(self) -> bool:
        """Whether nobody knows yet if the two fit."""
        return not self.up and self.generation == 0 and self.reason == ORDERED

    @property
    def misfits(self) -> bool:
        """Whether the two will never fit; an operator must act."""
        return not self.up and self.reason.startswith("misfit")


@dataclass(slots=True, eq=False)
class Member:
    """State of one session; ends with it. Event-loop thread only.

    asking    attempts that it was asked to grant and has granted no blocks yet, in order of asking
    refusing  it refused something and hasn't sent a load report since: it isn't asked again before
    doubted   a decode worker has lost its link to it: until the next load report it may be dead
    """

    session: Session[Down, Up]
    hello: Hello
    liveness: Liveness
    joined_s: float
    draining: bool = False
    refusing: bool = False
    doubted: bool = False
    live: bool = True
    accounting: Accounting = field(default_factory=Accounting)
    credit: Credit = field(default_factory=Credit)
    cache: PrefixIndex = field(init=False)
    silence_told: bool = False  # the log has said that no block events come
    fits: WorkerFits = field(default_factory=WorkerFits)
    pairs: dict[str, PairRecord] = field(
        default_factory=dict
    )  # by id of the decode worker, in order of asking
    legs: dict[int, Leg] = field(default_factory=dict)
    asking: dict[int, None] = field(default_factory=dict)
    demand: int = 0  # last one told

    def __post_init__(self) -> None:
        self.cache = PrefixIndex(self.hello.num_blocks)

    @property
    def books_add_up(self) -> bool:
        """Whether nothing is booked for attempts that don't run here. O(1)."""
        return max(self.accounting.num_assigned, self.credit.num_held) <= len(self.legs)

    @property
    def id(self) -> str:
        return self.hello.worker.id

    @property
    def ref(self) -> WorkerRef:
        return self.hello.worker

    @property
    def prefills(self) -> bool:
        """Whether it prefills for other workers."""
        return self.hello.role is Role.PREFILL

    @property
    def decodes(self) -> bool:
        """Whether it decodes, and so can prefill for itself."""
        return self.hello.role in (Role.DECODE, Role.BOTH)

    @property
    def usable(self) -> bool:
        """Whether new work may go there at all."""
        return self.live and not self.draining and not self.liveness.suspect

    def send(self, message: Down) -> None:
        """Queue a message; a dead session swallows it."""
        if self.live:
            self.session.send(message)

    def open_leg(self, handle: int, leg: Leg) -> None:
        """Messages under this handle go to `leg` from now on."""
        self.legs[handle] = leg

    def close_leg(self, handle: int) -> None:
        """Drop, and count, what still comes under this handle; its bookings are undone."""
        self.legs.pop(handle, None)
        self.asking.pop(handle, None)
        self.credit.release(handle)
        self.accounting.drop(handle)

    def abort(self, handle: int) -> None:
        """Tell the worker to end the attempt."""
        self.send(Abort(handle))

    def answered(self, handle: int) -> None:
        """The worker has said something about this attempt: it counts it itself now."""
        self.credit.release(handle)
        self.accounting.answered(handle)
