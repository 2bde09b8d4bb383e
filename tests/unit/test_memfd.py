"""Pools in a memfd: sealed by their owner, checked by who maps them, readable to the end of a copy."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import mmap
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from pdserve.errors import InvalidRequest, InvariantViolated
from pdserve.kv_memory import ByteSpan, HostMemory
from pdserve.memfd import MappedPool, MemfdMemory, RankMemory, shareable_memory
from pdserve.memory_pages import HUGE_BYTES
from pdserve.shared_mapping import SharedMapping

NUM_BYTES = 3 * mmap.PAGESIZE + 17


def _descriptor(memory: MemfdMemory) -> int:
    descriptor = memory.export("memfd")
    assert descriptor is not None
    return descriptor


def _read(pool: MappedPool, start: int, num_bytes: int) -> bytes:
    return ctypes.string_at(pool.address(ByteSpan(start, num_bytes)), num_bytes)


def test_what_the_owner_writes_is_what_the_other_reads() -> None:
    memory = MemfdMemory(NUM_BYTES)
    assert bytes(memory.bytes) == bytes(NUM_BYTES), "it begins zeroed"
    pool = MappedPool(_descriptor(memory), NUM_BYTES)
    memory.view(ByteSpan(100, 5))[:] = b"hello"
    assert _read(pool, 99, 7) == b"\0hello\0"
    pool.close()
    pool.close()


@pytest.mark.parametrize(("start", "num_bytes"), [(-1, 2), (NUM_BYTES - 1, 2), (NUM_BYTES, 1)])
def test_reads_stay_inside_the_pool(start: int, num_bytes: int) -> None:
    memory = MemfdMemory(NUM_BYTES)
    pool = MappedPool(_descriptor(memory), NUM_BYTES)
    with pytest.raises(InvariantViolated):
        _read(pool, start, num_bytes)
    pool.close()
    with pytest.raises(InvariantViolated):
        _read(pool, 0, 1)


def test_nobody_can_resize_it_or_take_the_seals_off() -> None:
    memory = MemfdMemory(NUM_BYTES)
    for size in (0, NUM_BYTES * 9):
        with pytest.raises(PermissionError):
            os.ftruncate(_descriptor(memory), size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(_descriptor(memory), fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_who_gets_the_descriptor_cannot_map_it_writable() -> None:
    """Where the system has that seal (Linux 5.1)."""
    memory = MemfdMemory(NUM_BYTES)
    if not fcntl.fcntl(_descriptor(memory), fcntl.F_GET_SEALS) & 0x10:
        pytest.skip("no F_SEAL_FUTURE_WRITE here")
    with pytest.raises(PermissionError):
        mmap.mmap(_descriptor(memory), NUM_BYTES)
    memory.view(ByteSpan(0, 1))[:] = b"x"


def test_other_memory_has_nothing_to_export() -> None:
    assert HostMemory(8).export("memfd") is None
    assert MemfdMemory(8).export("cuda_ipc") is None


@contextmanager
def _file(size: int) -> Iterator[int]:
    with tempfile.TemporaryFile() as file:
        file.truncate(size)
        yield file.fileno()


@contextmanager
def _memfd(size: int, seals: int) -> Iterator[int]:
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    yield descriptor
    os.close(descriptor)


@contextmanager
def _pipe() -> Iterator[int]:
    near, far = os.pipe()
    yield near
    os.close(near)
    os.close(far)


BOTH = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


@pytest.mark.parametrize(
    ("open_it", "reason"),
    [
        (lambda: _file(NUM_BYTES), "not a memfd"),
        (_pipe, "not a memfd"),
        (lambda: _memfd(NUM_BYTES, 0), "not sealed"),
        (lambda: _memfd(NUM_BYTES, fcntl.F_SEAL_GROW), "not sealed"),
        (lambda: _memfd(NUM_BYTES - 1, BOTH), "another size"),
        (lambda: _memfd(0, BOTH), "another size"),
        (lambda: _memfd(NUM_BYTES + mmap.PAGESIZE, BOTH), "another size"),
    ],
)
def test_what_is_no_pool_of_this_size_is_refused_with_the_reason(
    open_it: Callable[[], AbstractContextManager[int]], reason: str
) -> None:
    with open_it() as descriptor, pytest.raises(InvalidRequest, match=reason):
        MappedPool(descriptor, NUM_BYTES)


def _huge_kib(address: int, kind: str) -> int:
    """Of the mapping at this address, by the kernel's account; 0 if it is none any longer."""
    is_it, found = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0]:
            low, high = (int(each, 16) for each in words[0].split("-"))
            is_it = low <= address < high
        elif is_it and words[0] == f"{kind}:":
            found = int(words[1])
    return found


def test_a_pool_is_put_on_huge_pages_as_far_as_it_is_used() -> None:
    """By its owner; a reader maps the same pages whole, too."""
    memory = MemfdMemory(4 * HUGE_BYTES + 17)
    address = memory.address(ByteSpan(0, 1))
    assert address % HUGE_BYTES == 0
    if not _huge_kib(address, "ShmemPmdMapped"):
        pytest.skip("shared memory has no huge pages here")
    assert _huge_kib(address, "ShmemPmdMapped") == HUGE_BYTES >> 10, "one page for the first byte"
    memory.view(ByteSpan(2 * HUGE_BYTES, 5))[:] = b"hello"
    assert _huge_kib(address, "ShmemPmdMapped") == 3 * HUGE_BYTES >> 10
    assert bytes(memory.bytes[: 2 * HUGE_BYTES]) == bytes(2 * HUGE_BYTES)
    mapping = SharedMapping(_descriptor(memory), memory.num_bytes, writable=False)
    assert ctypes.string_at(mapping.address + 2 * HUGE_BYTES, 5) == b"hello"
    assert _huge_kib(mapping.address, "ShmemPmdMapped") > 0
    mapping.close()
    memory.view(ByteSpan(memory.num_bytes - 1, 1))[:] = b"!"  # the rest is no whole page
    assert _huge_kib(address, "ShmemPmdMapped") == 4 * HUGE_BYTES >> 10


def test_a_private_pool_lies_on_huge_pages_where_they_may_be_asked_for() -> None:
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not enabled.exists() or "[never]" in enabled.read_text():
        pytest.skip("no huge pages here")
    memory = HostMemory(4 * HUGE_BYTES)
    memory.bytes[:] = b"k" * memory.num_bytes
    assert _huge_kib(memory.address(ByteSpan(0, 1)), "AnonHugePages") > 0


def test_a_mapping_stands_as_long_as_somebody_looks_at_it() -> None:
    gc.collect()
    before = _mappings()
    memory = MemfdMemory(NUM_BYTES)
    view = memory.view(ByteSpan(3, 2))
    del memory
    gc.collect()
    view[:] = b"ab"
    assert _mappings() == before + 1
    view.release()
    gc.collect()
    assert _mappings() == before


OWNER = """
import os, sys
from pdserve.memfd import MemfdMemory
memory = MemfdMemory({size})
memory.bytes[:] = b"k" * {size}
print(f"/proc/{{os.getpid()}}/fd/{{memory.export('memfd')}}", flush=True)
sys.stdin.read()
"""


def test_a_mapping_outlives_its_owner_in_the_middle_of_a_copy() -> None:
    """The owner is a process that is killed; what it had written can still be read."""
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER.format(size=NUM_BYTES)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdin is not None and owner.stdout is not None
    descriptor = os.open(owner.stdout.readline().strip(), os.O_RDONLY)
    pool = MappedPool(descriptor, NUM_BYTES)
    os.close(descriptor)
    found = _read(pool, 0, 1000)
    owner.kill()
    owner.communicate()
    assert found + _read(pool, 1000, NUM_BYTES - 1000) == b"k" * NUM_BYTES
    pool.close()


def test_nothing_is_left_behind() -> None:
    gc.collect()
    before = _descriptors(), _mappings()
    for _ in range(100):
        memory = MemfdMemory(NUM_BYTES)
        MappedPool(_descriptor(memory), NUM_BYTES).close()
        del memory
    gc.collect()
    assert (_descriptors(), _mappings()) == before


def _descriptors() -> int:
    """Of pools only: what other tests left to a thread may be closed meanwhile."""
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += "memfd:pdserve-kv" in os.readlink(entry)
    return found


def _mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:pdserve-kv")


def test_where_a_memfd_cannot_grow_the_pool_is_private() -> None:
    """A limit on file sizes counts for memfds, too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (mmap.PAGESIZE, hard))
    try:
        assert shareable_memory(NUM_BYTES).export("memfd") is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_ranks_map_it_to_write_until_it_is_sealed() -> None:
    memory = MemfdMemory(NUM_BYTES, others_write=True)
    rank = RankMemory(os.dup(memory.descriptor), NUM_BYTES)
    rank.view(ByteSpan(7, 3))[:] = b"abc"
    memory.seal_writes()
    assert bytes(memory.view(ByteSpan(6, 5))) == b"\0abc\0"
    rank.view(ByteSpan(0, 2))[:] = b"xy"  # who has mapped it goes on
    assert bytes(memory.view(ByteSpan(0, 2))) == b"xy"
    with pytest.raises(OSError, match="not permitted"):
        RankMemory(os.dup(memory.descriptor), NUM_BYTES)
    pool = MappedPool(_descriptor(memory), NUM_BYTES)
    assert _read(pool, 0, 2) == b"xy"
    pool.close()
