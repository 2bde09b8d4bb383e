"""CUDA IPC by the driver's API, on a libcuda of the test's: what is passed, what is refused, and in which words."""

from __future__ import annotations

import ctypes
from typing import cast

import pytest

from kv_transfer.frames import MAX_HANDLE_BYTES
from kv_transfer.transports.cuda_driver import CudaDriver
from kv_transfer.transports.cuda_ipc_driver import DriverIpc
from pdserve.errors import InvalidRequest, InvariantViolated, WorkerLost
from pdserve.kv_memory import ByteSpan, DeviceMemory
from tests.support.fake_libcuda import FakeHost, FakeLibcuda

SIZE = 4096
_BEFORE = 512  # bytes of its allocation before the pool: torch's allocator shares one among tensors
GPU, OTHER_GPU = b"a GPU's 16 bytes", b"another one's 16"


class _Pool:
    """A pool on a device."""

    num_bytes = SIZE
    device = "cuda:0"
    checksums = ()

    def __init__(self, host: FakeHost) -> None:
        self.address_ = host.allocate(_BEFORE + SIZE) + _BEFORE

    def device_address(self, span: ByteSpan) -> int:
        return self.address_ + span.start

    def view(self, span: ByteSpan) -> memoryview:
        raise InvariantViolated("the host can't see it")

    def address(self, span: ByteSpan) -> int:
        raise InvariantViolated("the host can't see it")

    def checksum(self, kind: str, span: ByteSpan) -> int:
        raise InvariantViolated("none")

    def populate(self, end: int) -> bool:
        return False

    def export(self, transport: str) -> int | None:
        return None


class _Process:
    """One worker's side. visible: which of the host's GPUs it sees; its own is the first of them."""

    def __init__(self, host: FakeHost, *visible: int) -> None:
        self.lib = FakeLibcuda(host, visible)
        cuda = CudaDriver.open(0, lambda name: cast(ctypes.CDLL, self.lib))
        self.pool = _Pool(host)
        self.ipc = DriverIpc(cuda, cast(DeviceMemory, self.pool))

    def bytes_at(self, start: int, num_bytes: int) -> bytes:
        return ctypes.string_at(self.pool.address_ + start, num_bytes)

    def put(self, start: int, content: bytes) -> None:
        ctypes.memmove(self.pool.address_ + start, content, len(content))


@pytest.fixture
def host() -> FakeHost:
    return FakeHost(GPU, OTHER_GPU)


def test_bytes_of_another_processs_pool(host: FakeHost) -> None:
    """On the same GPU, or on another that it reaches; neighbours in one copy, done when the event is over."""
    for number, visible in enumerate([(0,), (1, 0)]):
        source, reader = _Process(host, 0), _Process(host, *visible)
        source.put(SIZE - 10, b"0123456789")
        handle = source.ipc.export()
        assert len(handle) <= MAX_HANDLE_BYTES
        mapping = reader.ipc.open(handle, SIZE)
        reader.lib.num_not_ready = 1
        reader.ipc.copy(mapping, [(SIZE - 10, 3, 4), (SIZE - 6, 7, 4), (SIZE - 2, 100, 2)])
        assert len(reader.lib._copies) == 2
        event = reader.ipc.record()
        assert not reader.ipc.is_over(event)
        assert reader.ipc.is_over(event)
        assert (reader.bytes_at(3, 8), reader.bytes_at(100, 2)) == (b"01234567", b"89"), number
        reader.ipc.close(mapping)
        assert not reader.lib.mapped


def test_what_cant_be_mapped_is_said(host: FakeHost) -> None:
    source, reader = _Process(host, 0), _Process(host, 1)
    handle = source.ipc.export()
    with pytest.raises(InvalidRequest, match="isn't visible here"):
        reader.ipc.open(handle, SIZE)
    apart = FakeHost(GPU, OTHER_GPU, peers=False)
    apart.exported, apart.allocated = host.exported, host.allocated
    with pytest.raises(InvalidRequest, match="no peer access"):
        _Process(apart, 1, 0).ipc.open(handle, SIZE)
    with pytest.raises(InvalidRequest, match="isn't named as one on a GPU"):
        reader.ipc.open(handle[:-1], SIZE)
    near = _Process(host, 0)
    with pytest.raises(InvalidRequest, match="another size"):
        near.ipc.open(handle, SIZE + 1)
    assert not near.lib.mapped, "what was opened is closed"
    near.lib.fails["cuIpcOpenMemHandle_v2"] = 801
    with pytest.raises(WorkerLost, match="error 801 of the test"):
        near.ipc.open(handle, SIZE)


@pytest.mark.parametrize("call", ["cuMemcpyAsync", "cuEventRecord", "cuEventQuery"])
def test_a_call_that_fails_is_told_in_cudas_words(host: FakeHost, call: str) -> None:
    source, reader = _Process(host, 0), _Process(host, 0)
    mapping = reader.ipc.open(source.ipc.export(), SIZE)
    reader.lib.fails[call] = 700
    with pytest.raises(WorkerLost, match="error 700 of the test"):
        reader.ipc.copy(mapping, [(0, 0, 8)])
        reader.ipc.is_over(reader.ipc.record())
