"""How long a compute thread spins for the others of its team (libgomp, torch's OpenMP runtime)."""

from __future__ import annotations

from collections.abc import MutableMapping

SPIN_COUNT = "GOMP_SPINCOUNT"
_TURNS = "10000"
_SET_BY_USER = (SPIN_COUNT, "OMP_WAIT_POLICY")


def wait_briefly(environ: MutableMapping[str, str]) -> None:
    """Let compute threads give their core away soon; before libgomp is loaded, which reads it once.

    By default they spin for 300,000 turns, some milliseconds: a thread that has lost its core to a router, a client or
    this process's own loop is waited for by one that keeps the other core busy, so it doesn't get that one either.
    10,000 turns are a fraction of a millisecond, longer than what lies between two kernels of a step.
    What the user has set stays.
    """
    if not any(name in environ for name in _SET_BY_USER):
        environ[SPIN_COUNT] = _TURNS
