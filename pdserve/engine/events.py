"""What one engine step reports, in the order in which it happened.

Blocks: `Preempted` and `HandedBackSeq` have lost theirs already. After every other last event of a sequence (RowDied,
StepDied, Sampled with `finish`, Sampled of a sequence started without `then_decode`) it has left the scheduler but
keeps its blocks until its owner calls `Engine.end`, as a link may still read them.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.engine.sequence import Sequence
from pdserve.errors import RowFailed, StepFailed
from pdserve.sampling import FinishReason, TokenLogprobs


@dataclass(frozen=True, slots=True)
class ChunkDone:
    """KV of the first num_computed positions is complete. Comes before the Sampled of the same step."""

    seq: Sequence
    num_computed: int


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Logprobs of prompt tokens from index `first` on, each once; comes before the ChunkDone of its step."""

    seq: Sequence
    first: int
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Sampled:
    """A token, already appended to seq.ids; `first`: the first one that this engine sampled or could sample for it.

    With `finish` the sequence has left the scheduler.
    """

    seq: Sequence
    token_id: int
    logprobs: TokenLogprobs | None
    finish: FinishReason | None
    first: bool


@dataclass(frozen=True, slots=True)
class RowDied:
    """This sequence alone can't go on; it has left the scheduler and its blocks will not be cached."""

    seq: Sequence
    error: RowFailed


@dataclass(frozen=True, slots=True)
class StepDied:
    """The step raised; its sequences have left the scheduler, unchanged.

    error  the cause hangs on it as __cause__
    sound  the engine may go on; False: the process must exit
    """

    seqs: tuple[Sequence, ...]
    error: StepFailed
    sound: bool


@dataclass(frozen=True, slots=True)
class Preempted:
    """Its blocks were taken for older sequences; it will be recomputed here."""

    seq: Sequence


@dataclass(frozen=True, slots=True)
class HandedBackSeq:
    """Its blocks were taken and it is too long to recompute here; it has left the scheduler."""

    seq: Sequence


EngineEvent = ChunkDone | PromptScored | Sampled | RowDied | StepDied | Preempted | HandedBackSeq
