"""A seed replays exactly."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
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


@pytest.mark.timeout(300)
def test_the_same_seed_gives_the_same_trace_in_another_order_and_under_another_hash_seed() -> None:
    first = _digests(SEEDS, "1")
    assert len(first) == len(SEEDS)
    assert len({line.split()[1] for line in first.values()}) == len(SEEDS), (
        "different seeds, different traces"
    )
    assert _digests(SEEDS[::-1], "2") == first
