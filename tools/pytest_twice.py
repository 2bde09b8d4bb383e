"""`pytest`, and every test that failed once more by itself: what passes then is unstable, and listed as such.

    python tools/pytest_twice.py PYTEST-ARGUMENTS…

For CI, where a machine under load may break a test that depends on more than it should. A second failure counts; so
does anything but failed tests (a crash, an interrupt, no tests). Exits with 0 if all passed, at the first or the
second run.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

MOST = 10  # more failures than that aren't the machine's
FAILED = 1  # pytest's exit status for failed tests


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status."""
    with tempfile.TemporaryDirectory() as cache:
        status = pytest(*arguments, "-o", f"cache_dir={cache}")
        if status != FAILED:
            return status
        failed = sorted(json.loads(Path(cache, "v/cache/lastfailed").read_text()))
    if len(failed) > MOST:
        print(f"{len(failed)} tests failed: too many to run again")
        return FAILED
    again = [test for test in failed if pytest(test) != 0]
    unstable = [test for test in failed if test not in again]
    for verdict, tests in (("FAILED TWICE", again), ("UNSTABLE, failed once and passed by itself", unstable)):
        for test in tests:
            print(f"!!! {verdict}: {test}")
    return FAILED if again else 0


def pytest(*arguments: str) -> int:
    """Its exit status."""
    return subprocess.run([sys.executable, "-m", "pytest", *arguments], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
