"""The secret that `pdserve up` draws: who may read it, how long it lies there, and who finds it."""

from __future__ import annotations

import random
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.errors import InvalidRequest
from pdserve.service.local_secret import drawn_secret, local_secret_file
from pdserve.service.private_folder import default_private_folder
from pdserve.service.secret import read_secret


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path) -> Iterator[None]:
    before, tempfile.tempdir = tempfile.tempdir, str(tmp_path)
    yield
    tempfile.tempdir = before


def test_it_is_there_for_this_user_alone_and_only_while_the_cluster_is() -> None:
    with drawn_secret(50052, random.Random(1)) as file:
        assert file == local_secret_file(50052)
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
        first = read_secret(str(file))
        with drawn_secret(50054, random.Random(2)) as other:
            assert first is not None and read_secret(str(other)) != first
    assert list(default_private_folder().iterdir()) == []


def test_what_a_killed_one_left_is_removed_and_what_a_living_one_holds_is_not() -> None:
    with drawn_secret(1, random.Random(1)) as living:
        stale = local_secret_file(2)
        stale.write_text("x" * 64)
        with drawn_secret(3, random.Random(3)):
            assert living.exists() and not stale.exists()


def test_a_folder_that_others_may_enter_is_refused() -> None:
    default_private_folder().mkdir(mode=0o755)
    with (
        pytest.raises(InvalidRequest, match=r"secrets must be private.*mode=755"),
        drawn_secret(1, random.Random(1)),
    ):
        pass
