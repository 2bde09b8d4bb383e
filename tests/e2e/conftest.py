"""Images that several files run, and a cluster of the packaged model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.containers import needs_namespaces
from tests.support.dockerfile import DOCKERFILE, ROOT, Builder
from tests.support.packaged import packaged
from tests.support.processes import LocalCluster


@pytest.fixture(scope="session")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    """Makes each image once. torch comes from where this machine's pip finds it."""
    needs_namespaces()
    folder = tmp_path_factory.mktemp("images")
    return Builder(DOCKERFILE, ROOT, folder, {"CPU_WHEELS": "", "CUDA_WHEELS": ""})


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of the packaged model."""
    return packaged("smollm2-135m")


@pytest.fixture(scope="module")
def smollm2_cluster(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """`pdserve up` with it, in float32."""
    folder = tmp_path_factory.mktemp("up")
    with LocalCluster(folder, "--model", "smollm2-135m", "--dtype", "float32") as made:
        yield made
