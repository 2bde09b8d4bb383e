"""The simulation finds what it is there to find: mutants of the packages, each with one rule taken out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulation import mutation
from tests.simulation.mutation import PatchFailed

NUM_SEEDS = 200  # within so many a mutant is found
QUICK = ("release_before_ack", "grant_not_released_when_session_ends", "index_restarted_after_replay")
"""Those of `make test`."""


def test_there_are_a_dozen_mutants() -> None:
    assert len(mutation.patches()) >= 12
    assert set(QUICK) <= set(mutation.patches())


@pytest.mark.parametrize("name", mutation.patches())
def test_a_patch_still_applies(name: str, tmp_path: Path) -> None:
    mutation.mutate(name, tmp_path)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", QUICK)
def test_a_mutant_is_found(name: str, tmp_path: Path) -> None:
    _find(name, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", [name for name in mutation.patches() if name not in QUICK])
def test_every_mutant_is_found(name: str, tmp_path: Path) -> None:
    _find(name, tmp_path)


def _find(name: str, folder: Path) -> None:
    mutation.mutate(name, folder)
    hunt = mutation.hunt(folder, NUM_SEEDS, num_processes=2)
    print(hunt.output)
    assert hunt.found, f"{name} lives through {NUM_SEEDS} seeds"


def test_a_patch_whose_lines_have_changed_fails(tmp_path: Path) -> None:
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "code.py").write_text("one\ntwo\nthree\n")
    patch = "--- a/room/code.py\n+++ b/room/code.py\n@@ -1,3 +1,2 @@\n one\n-two\n three\n"
    mutation.apply_patch(patch, tmp_path)
    assert (tmp_path / "room" / "code.py").read_text() == "one\nthree\n"
    with pytest.raises(PatchFailed, match="0 times"):
        mutation.apply_patch(patch, tmp_path)
    with pytest.raises(PatchFailed):
        mutation.apply_patch("", tmp_path)
