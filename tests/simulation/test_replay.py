"""A seed replays exactly."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import ChainMap
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FROZEN = Path(__file__).with_name("tapes.txt")
NUM_FROZEN = 500
SEEDS = tuple(range(20))


def _digests(seeds: Sequence[int], hash_seed: str) -> dict[str, str]:
    """Seed -> digest and length of its full trace, computed in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulation", "--digests", *map(str, seeds)],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
    )
    return {line.split()[0]: line for line in done.stdout.splitlines()}


# asyncio's own order of callbacks may differ between Python versions.
frozen_here = pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="traces are frozen for Python 3.11")
CHANGED = "what the cluster says or does has changed; if that is meant, `make tapes` and say in the commit what and why"


def _frozen() -> dict[str, str]:
    lines = {line.split()[0]: line for line in FROZEN.read_text().splitlines()}
    assert len(lines) == NUM_FROZEN
    return lines


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_same_seed_gives_the_same_trace_in_another_order_and_under_another_hash_seed() -> None:
    first = _digests(SEEDS, "1")
    assert len(first) == len(SEEDS)
    assert len({line.split()[1] for line in first.values()}) == len(SEEDS), (
        "different seeds, different traces"
    )
    assert _digests(SEEDS[::-1], "2") == first


@frozen_here
def test_the_first_traces_are_the_frozen_ones() -> None:
    frozen = _frozen()
    assert _digests(SEEDS, "1") == {str(seed): frozen[str(seed)] for seed in SEEDS}, CHANGED


@pytest.mark.slow
@frozen_here
@pytest.mark.timeout(900)
def test_every_frozen_trace_is_what_it_was() -> None:
    halves = range(NUM_FROZEN // 2), range(NUM_FROZEN // 2, NUM_FROZEN)
    with ThreadPoolExecutor() as pool:
        got = dict(ChainMap(*pool.map(_digests, halves, ("3", "4"))))
    changed = [seed for seed, line in _frozen().items() if got[seed] != line]
    assert not changed, f"{CHANGED}: seeds {', '.join(changed[:20])} …"
