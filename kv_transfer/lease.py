"""A lease at either end, between two turns: plain state; the rules are in sender.py and receiver.py."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from kv_transfer.frames import Commit, PulledPiece
from pdserve.errors import PdserveError
from pdserve.ids import NAMELESS, AttemptName, WorkerRef


class SendState(Enum):
    """P's end: OPEN -> COMMITTED -> closed; RELEASING = over, but D, or a send under way, may still read its blocks."""

    OPEN = "open"
    COMMITTED = "committed"
    RELEASING = "releasing"


class ReceiveState(Enum):
    """D's end: GRANTED -> PULLING -> ACKED -> handed off."""

    GRANTED = "granted"
    PULLING = "pulling"
    ACKED = "acked"


@dataclass(slots=True, kw_only=True, eq=False)
class SendLease:
    """One lease at the prefill worker.

    block_ids       P's blocks of sequence blocks num_skip … upto − 1
    pulls           pieces that D asked for and that have not been sent
    pulled_bytes    asked for so far; less than what is offered means that a PULL is awaited
    progress_s      when something last moved
    watched_s, pass_limit  kept by patience.py
    error           why it is over (RELEASING); None: confirmed
    """

    lease_id: int
    num_blocks: int
    num_skip: int
    progress_s: float
    state: SendState = SendState.OPEN
    upto: int = 0
    block_ids: list[int] = field(default_factory=list)
    pulls: deque[PulledPiece] = field(default_factory=deque)
    pulled_bytes: int = 0
    sent_bytes: int = 0
    error: PdserveError | None = None
    name: AttemptName = NAMELESS
    watched_s: float = -1.0
    pass_limit: int = 0
    is_stuck_logged: bool = False

    def enter(self, state: SendState, now_s: float) -> None:
        self.state = state
        self.progress_s = now_s
        self.is_stuck_logged = False


UNASKED, ASKED, WRITTEN = 0, 1, 2
"""A piece's entry in the bitmap."""


@dataclass(slots=True, kw_only=True, eq=False)
class ReceiveLease:
    """One lease at the decode worker. Pieces are numbered through the expected blocks, in order.

    num_expected    blocks that must come: sequence blocks num_skip … num_skip + num_expected − 1
    upto            sequence blocks offered so far, counted from 0
    block_ids       D's blocks they go into
    remote_ids      P's block ids of the offered ones (where D reads itself)
    pieces          the bitmap: UNASKED, ASKED or WRITTEN for each piece; num_written of them are WRITTEN
    next_piece      the first that was never asked for; again: those to fetch a second time; retried: those that were
    num_waits       looks at the time at which its link moved, though perhaps for others
    watched_s, pass_limit  kept by patience.py
    """

    lease_id: int
    source: WorkerRef
    num_expected: int
    num_skip: int
    block_ids: tuple[int, ...]
    progress_s: float
    pieces: bytearray
    upto: int
    state: ReceiveState = ReceiveState.GRANTED
    remote_ids: list[int] = field(default_factory=list)
    next_piece: int = 0
    again: deque[int] = field(default_factory=deque)
    retried: set[int] = field(default_factory=set)
    num_asked: int = 0
    num_written: int = 0
    num_full_blocks: int = 0
    num_reported_blocks: int = 0
    received_bytes: int = 0
    is_in_rotation: bool = False
    commit: Commit | None = None
    first_pull_s: float | None = None
    last_data_s: float | None = None
    commit_s: float | None = None
    name: AttemptName = NAMELESS
    num_waits: int = 0
    watched_s: float = -1.0
    pass_limit: int = 0
    is_stuck_logged: bool = False

    @property
    def is_filled(self) -> bool:
        return self.num_written == len(self.pieces)

    def enter(self, state: ReceiveState, now_s: float) -> None:
        self.state = state
        self.progress_s = now_s
        self.is_stuck_logged = False
