"""Many seeds over a few processes."""

from __future__ import annotations

import gc
import multiprocessing
from collections import Counter
from collections.abc import Generator, Iterable
from dataclasses import dataclass

from tests.simulation.coverage import Coverage
from tests.simulation.run import run_seed

_CHUNK = 4
_SWEEP_EVERY = 16


@dataclass(frozen=True, slots=True)
class Outcome:
    """One seed's result, as it travels between processes."""

    seed: int
    violations: tuple[str, ...]
    coverage: Coverage
    ends: Counter[str]
    num_requests: int
    num_faults: int
    virtual_s: float


def run_one(seed: int) -> Outcome:
    """Run one seed."""
    result = run_seed(seed)
    return Outcome(
        seed=seed,
        violations=tuple(str(violation) for violation in result.violations),
        coverage=result.coverage,
        ends=result.ends,
        num_requests=len(result.scenario.plans),
        num_faults=len(result.scenario.faults),
        virtual_s=result.virtual_s,
    )


def run_many(seeds: Iterable[int], num_processes: int) -> Generator[Outcome, None, None]:
    """Outcomes in the order of the seeds; closing the iterator ends the processes."""
    if num_processes == 1:
        begin_process()
        yield from map(_run_swept, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(num_processes, begin_process) as pool:
        yield from pool.imap(_run_swept, seeds, _CHUNK)


def begin_process() -> None:
    """A run leaves little garbage; searching the whole heap for it, again and again, takes a fifth of the time."""
    gc.collect()
    gc.freeze()
    gc.disable()


def _run_swept(seed: int) -> Outcome:
    outcome = run_one(seed)
    if seed % _SWEEP_EVERY == 0:
        gc.collect()
    return outcome
