"""`python -m tests.simulation`: many seeds until one finds something, or one seed again.

--seeds N --first n   run N seeds from n on; stop at the first violation and tell its story
--seed N              run one seed again, exactly, and tell it (--request q7: only that of one request)
--digests N N …       print the digest of the full trace of each of these seeds, in this order
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence

from pdserve.clock import SystemClock
from tests.simulation.batch import begin_process, run_many
from tests.simulation.coverage import Coverage
from tests.simulation.run import run_seed
from tests.simulation.story import request_of, story

_SAY_EVERY = 100


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code: 1 if an invariant was broken."""
    parser = argparse.ArgumentParser("tests.simulation", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=500, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first one")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, help="replay this one")
    parser.add_argument("--request", default="", help="tell the story of this one")
    parser.add_argument("--brief", action="store_true", help="no story, only what was broken")
    parser.add_argument("--digests", type=int, nargs="+", help="print the digests of these seeds' traces")
    asked = parser.parse_args(arguments)
    if asked.digests:
        return _digests(asked.digests)
    if asked.seed is not None:
        return _replay(asked.seed, asked.request)
    return _search(range(asked.first, asked.first + asked.seeds), asked.processes, brief=asked.brief)


def _search(seeds: range, num_processes: int, *, brief: bool) -> int:
    clock = SystemClock()
    begun_s = clock.now_s()
    coverage, ends = Coverage(), Counter[str]()
    num_requests = num_faults = 0
    virtual_s = 0.0
    outcomes = run_many(seeds, num_processes)
    for count, outcome in enumerate(outcomes, start=1):
        coverage.merge(outcome.coverage)
        ends.update(outcome.ends)
        num_requests += outcome.num_requests
        num_faults += outcome.num_faults
        virtual_s += outcome.virtual_s
        if outcome.violations:
            outcomes.close()
            print(f"seed {outcome.seed}, the {count}th, breaks {len(outcome.violations)} invariants")
            if brief:
                print("\n".join(outcome.violations[:5]))
                return 1
            return _replay(outcome.seed, "")
        if count % _SAY_EVERY == 0 or count == len(seeds):
            took_s = clock.now_s() - begun_s
            print(
                f"{count} seeds, {count / took_s:.2f} seeds/s: {num_requests} requests, {num_faults} faults, "
                f"{virtual_s / 3600:.1f} simulated hours, no violation",
                flush=True,
            )
    if not brief:
        print(coverage)
    print("ends:", ", ".join(f"{end} {count}" for end, count in ends.most_common()))
    return 0


def _replay(seed: int, request: str) -> int:
    result = run_seed(seed, full=True)
    if not request and result.violations:
        request = request_of(result.violations[0], result)
    for line in story(result, request):
        print(line)
    print(f"trace {result.tape.digest}, {len(result.tape.lines)} lines")
    for violation in result.violations:
        print(f"VIOLATION {violation}")
    print(f"replay: python -m tests.simulation --seed {seed}" + (f" --request {request}" if request else ""))
    return 1 if result.violations else 0


def _digests(seeds: Sequence[int]) -> int:
    begin_process()
    for seed in seeds:
        result = run_seed(seed, full=True)
        print(seed, result.tape.digest, len(result.tape.lines))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
