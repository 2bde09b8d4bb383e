"""Which device an engine gets, and what the links may know of its memory."""

from __future__ import annotations

import pytest
import torch

from pdserve.engine.device.devices import CpuDevice, DeviceKvMemory, find_cuda
from pdserve.errors import Incompatible, InvariantViolated
from pdserve.kv_memory import ByteSpan, DeviceMemory

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@needs_no_gpu
def test_without_a_gpu_auto_is_the_cpu() -> None:
    assert find_cuda("auto") is None
    assert find_cuda("cpu") is None


@needs_no_gpu
@pytest.mark.parametrize("wanted", ["cuda", "cuda:0", "cuda:7"])
def test_a_gpu_that_is_not_there_is_named(wanted: str) -> None:
    with pytest.raises(Incompatible, match=f"names a GPU that isn't there.*{wanted}"):
        find_cuda(wanted)


def test_memory_of_a_device_has_addresses_there_and_nothing_else() -> None:
    values = torch.zeros(100, dtype=torch.uint8)
    memory = DeviceKvMemory(values, 80)
    assert isinstance(memory, DeviceMemory)
    assert memory.device_address(ByteSpan(8, 72)) == values.data_ptr() + 8
    assert memory.checksums == ()
    assert memory.export("memfd") is None
    for call in (memory.view, memory.address):
        with pytest.raises(InvariantViolated, match="can't see"):
            call(ByteSpan(0, 8))
    for span in (ByteSpan(8, 73), ByteSpan(-1, 2), ByteSpan(4, -2)):
        with pytest.raises(InvariantViolated):
            memory.device_address(span)
    with pytest.raises(InvariantViolated):
        memory.checksum("xxh3_64", ByteSpan(0, 8))


def test_on_the_cpu_the_links_see_the_same_bytes() -> None:
    values, memory = CpuDevice().pool(80, 20)
    assert len(values) == 100
    memory.view(ByteSpan(3, 1))[0] = 7
    assert values[3] == 7
    assert memory.num_bytes == 80
