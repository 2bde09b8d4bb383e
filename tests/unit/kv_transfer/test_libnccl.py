"""The real libnccl, as far as it goes without a driver; skipped where it isn't installed (`make test-nccl`)."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from kv_transfer.transports.cuda_driver import CudaDriver
from kv_transfer.transports.libnccl import LEAST_VERSION, LibNccl, describe_loaded, load_nccl, loaded_paths
from kv_transfer.transports.nccl_port import RECEIVER_RANK
from pdserve.errors import Incompatible, WorkerLost
from pdserve.kv_memory import ByteSpan


def _is_installed() -> bool:
    spec = importlib.util.find_spec("nvidia")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    return any((Path(folder) / "nccl/lib/libnccl.so.2").exists() for folder in folders)


installed = pytest.mark.skipif(not _is_installed(), reason="nvidia-nccl-cu12 isn't installed: make test-nccl")
no_driver = pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a driver")


class _NoDevice:
    """Stands where CUDA would, for calls that NCCL refuses by itself."""

    def enter(self) -> None: ...

    def make_stream(self) -> int:
        raise AssertionError("nothing moves")

    def record(self, stream: int) -> int:
        raise AssertionError("nothing moves")

    def is_over(self, event: int) -> bool:
        raise AssertionError("nothing moves")

    def blank(self, num_bytes: int) -> int:
        raise AssertionError("nothing moves")


def _nowhere(span: ByteSpan) -> int:
    raise AssertionError("nothing moves")


def _at_once(call: Callable[[], None]) -> None:
    call()


@pytest.fixture
def nccl() -> LibNccl:
    return LibNccl(load_nccl(), _NoDevice(), address=_nowhere, run_beside=_at_once)


def test_what_doctor_is_told() -> None:
    assert describe_loaded(list) == ""
    assert (
        describe_loaded(lambda: ["/a/libnccl.so.2", "/b/libnccl.so.2"])
        == "several: /a/libnccl.so.2, /b/libnccl.so.2"
    )


@installed
def test_it_is_loaded_once_and_names_its_version_and_file() -> None:
    library = load_nccl()
    assert library.version >= LEAST_VERSION
    assert loaded_paths() == [library.path] and library.path.endswith("libnccl.so.2")
    assert load_nccl().path == library.path and len(loaded_paths()) == 1
    assert str(library) == f"NCCL {'.'.join(map(str, library.version))} ({library.path})"


@installed
def test_unique_ids_differ(nccl: LibNccl) -> None:
    first, second = nccl.make_unique_id(), nccl.make_unique_id()
    assert len(first) == len(second) == 128 and first != second


@installed
@no_driver
def test_a_communicator_is_refused_at_once_in_its_own_words(nccl: LibNccl) -> None:
    with pytest.raises(WorkerLost, match="CUDA driver version is insufficient") as raised:
        nccl.init(nccl.make_unique_id(), RECEIVER_RANK)
    assert raised.value.fields["call"] == "ncclCommInitRankConfig"


@no_driver
def test_without_a_driver_the_operator_reads_what_the_loader_says() -> None:
    with pytest.raises(Incompatible, match=r"no CUDA driver.*libcuda.so.1"):
        CudaDriver.open(0)


@pytest.mark.skipif(_is_installed(), reason="nvidia-nccl-cu12 is installed")
def test_without_the_library_the_operator_reads_what_to_install() -> None:
    with pytest.raises(Incompatible, match=r"pip install 'pdserve\[cuda12\]'"):
        load_nccl()
