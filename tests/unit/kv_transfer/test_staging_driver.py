"""Copies to and from the host by the driver's API, on a libcuda of the test's: what is passed, and what fails."""

from __future__ import annotations

import ctypes
from typing import cast

import pytest

from kv_transfer.transports.cuda_driver import CudaDriver
from kv_transfer.transports.staging_driver import DriverCopies
from pdserve.errors import WorkerLost
from pdserve.kv_memory import ByteSpan, DeviceMemory
from tests.support.fake_libcuda import FakeHost, FakeLibcuda

SIZE = 4096


class _Pool:
    def __init__(self, host: FakeHost) -> None:
        self.start = host.allocate(SIZE)

    def device_address(self, span: ByteSpan) -> int:
        return self.start + span.start


def test_bytes_of_the_pool_come_to_the_host_and_go_back() -> None:
    """When their event is over, and not before: the host may do other work meanwhile."""
    host = FakeHost(b"a GPU's 16 bytes")
    lib = FakeLibcuda(host, (0,))
    pool = _Pool(host)
    cuda = CudaDriver.open(0, lambda name: cast(ctypes.CDLL, lib))
    copies = DriverCopies(cuda, cast(DeviceMemory, pool))
    pinned = copies.pin(1024)
    ctypes.memmove(pool.start + 100, b"abcdef", 6)
    copies.fetch(ByteSpan(100, 6), 32)
    event = copies.record()
    lib.num_not_ready = 1
    assert not copies.is_over(event) and bytes(pinned[32:38]) == bytes(6)
    assert copies.is_over(event) and bytes(pinned[32:38]) == b"abcdef"
    pinned[500:504] = b"wxyz"
    copies.store(500, ByteSpan(SIZE - 4, 4))
    assert copies.is_over(copies.record())
    assert ctypes.string_at(pool.start + SIZE - 4, 4) == b"wxyz"


@pytest.mark.parametrize("call", ["cuMemHostAlloc", "cuMemcpyAsync", "cuEventRecord", "cuEventQuery"])
def test_a_call_that_fails_says_which(call: str) -> None:
    host = FakeHost(b"a GPU's 16 bytes")
    lib = FakeLibcuda(host, (0,))
    copies = DriverCopies(
        CudaDriver.open(0, lambda name: cast(ctypes.CDLL, lib)), cast(DeviceMemory, _Pool(host))
    )
    lib.fails[call] = 2
    with pytest.raises(WorkerLost, match=call):
        copies.pin(1024)
        copies.fetch(ByteSpan(0, 8), 0)
        copies.is_over(copies.record())
