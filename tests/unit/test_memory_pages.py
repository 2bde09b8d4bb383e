"""Memory that is there before its first use: step by step, in every kind of pool, and no harm where that can't be."""

from __future__ import annotations

import ctypes
import mmap
import resource
from collections.abc import Callable

import pytest

from pdserve.kv_memory import ByteSpan, HostMemory
from pdserve.memfd import MemfdMemory
from pdserve.memory_pages import HUGE_BYTES, populated

NUM_BYTES = 3 * HUGE_BYTES + 5000


def _on_small_pages(num_bytes: int) -> HostMemory:
    return HostMemory(num_bytes, memoryview(mmap.mmap(-1, num_bytes)))


def _num_faults_of_writing(memory: HostMemory, num_bytes: int) -> int:
    address = memory.address(ByteSpan(0, num_bytes))
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    ctypes.memset(address, 7, num_bytes)
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


@pytest.mark.parametrize("make", [_on_small_pages, HostMemory, MemfdMemory])
def test_who_writes_finds_it_there(make: Callable[[int], HostMemory]) -> None:
    memory = make(NUM_BYTES)
    if not populated(memory.address(ByteSpan(0, 1)), 1):
        pytest.skip("this system finds memory only at its first use")
    memory.bytes[:3] = b"abc"
    assert [memory.populate(NUM_BYTES) for _ in range(5)] == [True, True, True, False, False]
    assert bytes(memory.bytes[:5]) == b"abc\0\0", "what was written stays"
    assert _num_faults_of_writing(memory, NUM_BYTES) < 8


def test_only_what_was_asked_for_is_taken() -> None:
    memory = _on_small_pages(NUM_BYTES)
    if not populated(memory.address(ByteSpan(0, 1)), 1):
        pytest.skip("this system finds memory only at its first use")
    assert not memory.populate(0)
    assert not memory.populate(100), "one stretch is enough"
    assert not memory.populate(HUGE_BYTES), "and it has been done"
    assert _num_faults_of_writing(memory, NUM_BYTES) > HUGE_BYTES // mmap.PAGESIZE


def test_memory_that_cannot_be_asked_for_is_left_to_its_first_use() -> None:
    """As on a kernel without it: the system refuses a stretch that begins within a page."""
    memory = HostMemory(NUM_BYTES, memoryview(mmap.mmap(-1, NUM_BYTES + mmap.PAGESIZE))[1:])
    assert not memory.populate(NUM_BYTES), "nothing more to try"
    memory.bytes[:] = b"k" * NUM_BYTES
