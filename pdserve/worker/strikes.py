"""What a failed step means for each sequence that was in it."""

from __future__ import annotations

from pdserve.engine.events import StepDied
from pdserve.engine.sequence import Sequence
from pdserve.errors import PdserveError, RowFailed


def error_after(died: StepDied, seq: Sequence) -> PdserveError:
    """StepFailed, which the router replays with one strike more; at the second strike, alone in its batch, the
    sequence itself is the cause and is never replayed."""
    if seq.num_strikes == 0:
        return died.error
    return RowFailed("its step failed twice", cause=str(died.error))
