"""The double of CUDA IPC notices whoever breaks a rule: else nothing that runs over it would mean anything."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from pdserve.errors import InvalidRequest, WorkerLost
from pdserve.kv_memory import ByteSpan, HostMemory
from tests.support.loop_cuda_ipc import IpcFabric, IpcMisused, LoopCudaIpc
from tests.support.memories import StagedMemory

SIZE = 1 << 12


class _Bench:
    """Two processes, and copies that end when they are told to."""

    def __init__(self) -> None:
        self._due: list[Callable[[], None]] = []
        self.fabric = IpcFabric(schedule=lambda _delay_s, call: self._due.append(call), delay=lambda: 1.0)
        self.source, self.reader = (
            LoopCudaIpc(self.fabric, name, StagedMemory(HostMemory(SIZE)), wake=lambda: None) for name in "pd"
        )
        self.handle = self.source.export()
        self.mapping = self.reader.open(self.handle, SIZE)

    def run(self) -> None:
        while self._due:
            self._due.pop(0)()


@pytest.fixture
def bench() -> _Bench:
    return _Bench()


def test_bytes_are_there_when_the_event_behind_them_is_over(bench: _Bench) -> None:
    bench.source.memory.at(ByteSpan(100, 5))[:] = b"hello"
    bench.reader.copy(bench.mapping, [(100, 7, 2), (102, 9, 3)])
    event = bench.reader.record()
    assert not bench.reader.is_over(event)
    bench.run()
    assert bench.reader.is_over(event)
    assert bytes(bench.reader.memory.at(ByteSpan(7, 5))) == b"hello"
    bench.reader.close(bench.mapping)


def _map_twice(bench: _Bench) -> None:
    bench.reader.open(bench.handle, SIZE)


def _export_twice(bench: _Bench) -> None:
    bench.source.export()


def _unmap_under_a_copy(bench: _Bench) -> None:
    bench.reader.copy(bench.mapping, [(0, 0, 8)])
    bench.reader.close(bench.mapping)


def _copy_from_what_is_unmapped(bench: _Bench) -> None:
    bench.reader.close(bench.mapping)
    bench.reader.copy(bench.mapping, [(0, 0, 8)])


def _unmap_twice(bench: _Bench) -> None:
    bench.reader.close(bench.mapping)
    bench.reader.close(bench.mapping)


def _copy_from_outside(bench: _Bench) -> None:
    bench.reader.copy(bench.mapping, [(SIZE - 4, 0, 8)])


def _copy_to_the_outside(bench: _Bench) -> None:
    bench.reader.copy(bench.mapping, [(0, SIZE - 4, 8)])


def _ask_again(bench: _Bench) -> None:
    event = bench.reader.record()
    assert bench.reader.is_over(event)
    bench.reader.is_over(event)


@pytest.mark.parametrize("misuse", [_map_twice, _export_twice, _unmap_under_a_copy, _copy_from_what_is_unmapped,
                                    _unmap_twice, _copy_from_outside, _copy_to_the_outside, _ask_again])  # fmt: skip
def test_a_broken_rule_is_noticed(bench: _Bench, misuse: Callable[[_Bench], None]) -> None:
    with pytest.raises(IpcMisused):
        misuse(bench)


def test_another_thread_may_not_call(bench: _Bench) -> None:
    raised: list[BaseException] = []

    def call() -> None:
        try:
            bench.reader.record()
        except IpcMisused as error:
            raised.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert raised


def test_what_cant_be_mapped_is_no_misuse(bench: _Bench) -> None:
    bench.reader.close(bench.mapping)
    with pytest.raises(InvalidRequest, match="another size"):
        bench.reader.open(bench.handle, SIZE // 2)
    bench.source.die()
    with pytest.raises(WorkerLost, match="invalid resource handle"):
        bench.reader.open(bench.handle, SIZE)
