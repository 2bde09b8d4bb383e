"""One attempt at a decode worker, from StartDecode to its last message."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kv_transfer.messages import HandedOff
from pdserve.engine.sequence import SequenceState
from pdserve.ids import WorkerRef
from pdserve.messages import Phase
from pdserve.worker.attempt import WorkerAttempt


class DecodeState(Enum):
    """WAITING → GRANTED → ACTIVE → ENDED; without a source WAITING → ACTIVE; any of them → ENDED.

    GRANTED: it has its blocks, the prefill worker's KV is awaited. ACTIVE: the engine has it.
    """

    WAITING = "waiting"
    GRANTED = "granted"
    ACTIVE = "active"
    ENDED = "ended"


@dataclass(slots=True, eq=False, kw_only=True)
class DecodeAttempt(WorkerAttempt[DecodeState]):
    """Engine owner only.

    since_s      when this choice first asked for blocks anywhere here: its age in the waiting list
    ends_there   its first token, which the prefill worker samples, is its last: it needs nothing here
    last_place   the place in the waiting list that the router was told
    pull_progress  grows while its KV comes, or while the link that it comes over is busy with others
    """

    source: WorkerRef | None
    priority: int
    since_s: float
    serial: int
    ends_there: bool
    state: DecodeState = DecodeState.WAITING
    last_place: int | None = None
    pull_progress: int = 0
    admitted_s: float = 0.0
    started_s: float = 0.0
    decode_queue_s: float | None = None
    decode_step_s: float = 0.0
    handed_off: HandedOff | None = None

    @property
    def phase(self) -> Phase:
        """A preempted sequence counts as such until its recomputation is over."""
        if self.state is DecodeState.WAITING:
            return Phase.QUEUED
        if self.state is DecodeState.GRANTED:
            return Phase.PULLING
        if self.seq.state is SequenceState.RUNNING:
            return Phase.RUNNING
        if self.seq.state is SequenceState.PREFILLING and not self.seq.has_sampled:
            return Phase.PREFILLING
        return Phase.PREEMPTED

    @property
    def amount(self) -> int:
        phase = self.phase
        if phase is Phase.PULLING:
            return self.pull_progress
        if phase is Phase.PREFILLING:
            return self.seq.num_computed
        return self.seq.num_generated if phase is Phase.RUNNING else 0

    @property
    def peer(self) -> str:
        return str(self.source)

    @property
    def may_last(self) -> bool:
        return self.state is DecodeState.ACTIVE
