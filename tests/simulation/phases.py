"""In which phases a worker's requests are, read off the worker itself; counted when a fault strikes."""

from __future__ import annotations

from decode_worker.attempt import DecodeAttempt, DecodeState
from prefill_worker.attempt import PrefillAttempt, PrefillState
from tests.simulation.cluster import SimWorker
from tests.simulation.scenario import Moment


def phases_of(worker: SimWorker) -> dict[Moment, None]:
    """Phases of the requests that this worker has in hand, without repeats."""
    run = None if worker.worker is None else worker.worker.current
    if run is None:
        return {}
    found: dict[Moment, None] = {}
    for attempt in run.core.attempts:
        found[_of_decode(attempt) if isinstance(attempt, DecodeAttempt) else _of_prefill(attempt)] = None
    if run.draining and found:
        found[Moment.DRAINING] = None
    return found


def _of_decode(attempt: DecodeAttempt) -> Moment:
    match attempt.state:
        case DecodeState.WAITING:
            return Moment.QUEUED
        case DecodeState.GRANTED:
            return Moment.PULLING if attempt.num_pulled else Moment.GRANTED
        case _:
            return Moment.STREAMING


def _of_prefill(attempt: PrefillAttempt) -> Moment:
    """D has granted its blocks already; what is sampled is committed."""
    match attempt.state:
        case PrefillState.QUEUED:
            return Moment.GRANTED
        case PrefillState.PREFILLING:
            return Moment.PULLING
        case _:
            return Moment.COMMITTED
