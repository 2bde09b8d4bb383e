"""Seeds that every run of the tests includes, because they found a bug once."""

from __future__ import annotations

REGRESSION_SEEDS: dict[int, str] = {
    81: "a hanging engine that had nothing to do was never found: its requests waited for blocks for ever; and "
    "'Draining' passed on from a prefill worker took its decode worker out of use for good",
    91: "the simulation itself: a receive posted on a connection whose peer had gone was never said to be over",
    186: "the simulation itself, where two faults brought a second and a third process of one worker id",
    3065: "again the simulation: the last of three processes of one worker id was no longer known",
    110: "a session whose Hello came when its router had parted with all workers was kept, and its worker never "
    "dialled again; over gRPC for as long as the server takes to stop",
    368: "a router that stopped started an attempt for a request that was cancelled in the same turn",
    100014: "after an abort the engine's idle time counted as a step's: by that rate a request was refused that would "
    "have had its first token at once",
    100277: "again the simulation: a stranger that comes first at a router that has just started is its model",
    100137: "the simulation itself took two workers that don't fit the cluster for a pair that must serve",
}
"""Seed -> what it found. The scenarios of seeds change with scenario.py: a unit test holds the bug, too."""

RARE_SEEDS = (509, 714, 980, 1128, 1190)
"""They meet the rarest cell of the coverage table: a decode pool that is full while KV is pulled into a grant, which is
shorter since no more is granted at a time than can be used. When scenarios change others do: about one in 300."""

FIRST_SEED = 0
NUM_SEEDS = 260
"""Seeds of `make test`."""
NUM_SEEDS_SLOW = 500
"""Of `make test-slow`."""
