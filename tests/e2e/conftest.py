"""Images that several files run."""

from __future__ import annotations

import pytest

from tests.support.containers import needs_namespaces
from tests.support.dockerfile import DOCKERFILE, ROOT, Builder


@pytest.fixture(scope="session")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    """Makes each image once. torch comes from where this machine's pip finds it."""
    needs_namespaces()
    folder = tmp_path_factory.mktemp("images")
    return Builder(DOCKERFILE, ROOT, folder, {"CPU_WHEELS": "", "CUDA_WHEELS": ""})
