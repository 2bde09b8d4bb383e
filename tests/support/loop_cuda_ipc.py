"""CUDA IPC as it behaves and as it may be used, in one process, on an injected schedule.

    the calls of one thread only            a pool: mapped once, and unmapped when no copy from it is under way
    a copy: inside both pools, from a pool that is mapped     an event: behind copies, asked until it is over

Whoever breaks one of these hears of it (IpcMisused). A copy reads and writes when the device comes to it, whatever its
transfer owner knows by then, and in the order of its stream. A pool whose process is gone lives until nobody has it
mapped; or, as told, the device that copies from it fails.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kv_transfer.transports.port import RemoteRead
from pdserve.errors import InvalidRequest, WorkerLost
from pdserve.kv_memory import ByteSpan
from tests.support.memories import StagedMemory
from tests.support.memory_channel import DeviceWatch, Schedule

_FAILED = "an illegal memory access was encountered"


class IpcMisused(AssertionError):
    """A rule of CUDA, or of ours for it, is broken."""


def _rule(holds: bool, what: str) -> None:
    if not holds:
        raise IpcMisused(what)


class IpcFabric:
    """One host's devices. is_visible: whether one process can map another's pool, by their names."""

    def __init__(
        self,
        *,
        schedule: Schedule,
        delay: Callable[[], float],
        is_visible: Callable[[str, str], bool] = lambda source, target: True,
    ) -> None:
        self.schedule = schedule
        self.delay = delay
        self.is_visible = is_visible
        self.exported: dict[bytes, LoopCudaIpc] = {}
        self.devices: list[LoopCudaIpc] = []


@dataclass(slots=True, eq=False)
class _Copy:
    mapping: int
    source: LoopCudaIpc
    read: RemoteRead
    memory: StagedMemory
    is_over: bool = False


class LoopCudaIpc:
    """One process's device: CudaIpc (kv_transfer/transports/cuda_ipc_port.py).

    memory, wake    of the present transfer owner: the next one, in another role, brings its own
    copy_takes_s    in place of a drawn time
    fails_with_peer the device fails at a copy from a pool whose process is gone
    """

    def __init__(
        self,
        fabric: IpcFabric,
        name: str,
        memory: StagedMemory,
        *,
        wake: Callable[[], None],
        watch: DeviceWatch | None = None,
    ) -> None:
        self.name = name
        self.memory = memory
        self.wake = wake
        self.fails: dict[str, str] = {}  # the next call of this name fails with these words
        self.copy_takes_s: float | None = None
        self.fails_with_peer = False
        self.mapped: dict[int, LoopCudaIpc] = {}
        self.is_dead = False
        self._fabric = fabric
        self._watch = watch
        self._lane: deque[_Copy] = deque()
        self._events: dict[int, list[_Copy]] = {}
        self._num_made = 0
        self._thread: int | None = None
        self._has_failed = False
        self._handle = len(fabric.devices).to_bytes(8, "little") + name.encode()
        fabric.devices.append(self)

    @property
    def num_under_way(self) -> int:
        return len(self._lane)

    # --- the calls

    def export(self) -> bytes:
        self._enter("export")
        _rule(self._handle not in self._fabric.exported, "a pool exported twice")
        self._fabric.exported[self._handle] = self
        return self._handle

    def open(self, handle: bytes, num_bytes: int) -> int:
        self._enter("open")
        source = self._fabric.exported.get(handle)
        if source is None or source.is_dead:
            raise WorkerLost("CUDA failed", call="cuIpcOpenMemHandle", said="invalid resource handle")
        if not self._fabric.is_visible(source.name, self.name):
            raise InvalidRequest("the peer's pool can't be mapped", reason="its GPU isn't visible here")
        if source.memory.num_bytes != num_bytes:
            raise InvalidRequest("the peer's pool can't be mapped", reason="another size")
        _rule(source not in self.mapped.values(), "a pool mapped twice")
        self.mapped[self._next_number()] = source
        return self._num_made

    def close(self, mapping: int) -> None:
        self._enter("close")
        _rule(mapping in self.mapped, "unmapped, and not mapped")
        _rule(all(copy.mapping != mapping for copy in self._lane), "unmapped under a copy")
        del self.mapped[mapping]

    def copy(self, mapping: int, reads: Sequence[RemoteRead]) -> None:
        for read in reads:
            self._enter("copy")
            _rule(mapping in self.mapped, "a copy from a pool that isn't mapped")
            start, into, num_bytes = read
            source = self.mapped[mapping]
            _rule(0 <= start <= start + num_bytes <= source.memory.num_bytes, "a copy outside of P's pool")
            _rule(0 <= into <= into + num_bytes <= self.memory.num_bytes, "a copy outside of D's pool")
            self._lane.append(_Copy(mapping, source, read, self.memory))
            if len(self._lane) == 1:
                self._begin()

    def record(self) -> int:
        self._enter("record")
        self._events[self._next_number()] = list(self._lane)
        return self._num_made

    def is_over(self, event: int) -> bool:
        self._enter("is_over")
        _rule(event in self._events, "an event that isn't, or was over")
        if self._has_failed:
            raise WorkerLost("CUDA failed", call="cuEventQuery", said=_FAILED)
        if not all(copy.is_over for copy in self._events[event]):
            return False
        del self._events[event]
        return True

    # --- the device

    def _begin(self) -> None:
        wait_s = self._fabric.delay() if self.copy_takes_s is None else self.copy_takes_s
        self._fabric.schedule(wait_s, self._end)

    def _end(self) -> None:
        if self.is_dead:
            return
        copy = self._lane[0]
        if copy.source.is_dead and self.fails_with_peer:
            self._has_failed = True
            self.wake()
            return
        start, into, num_bytes = copy.read
        if self._watch is not None:
            self._watch.device_writes(ByteSpan(into, num_bytes))
        copy.memory.at(ByteSpan(into, num_bytes))[:] = copy.source.memory.at(ByteSpan(start, num_bytes))
        copy.is_over = True
        self._lane.popleft()
        if self._lane:
            self._begin()
        self.wake()

    def die(self) -> None:
        """The process is gone, as by kill -9, and what it had in hand with it."""
        self.is_dead = True
        self._lane.clear()

    def _next_number(self) -> int:
        self._num_made += 1
        return self._num_made

    def _enter(self, call: str) -> None:
        here = threading.get_ident()
        self._thread = self._thread or here
        _rule(self._thread == here, f"{call}: a call from another thread")
        if call in self.fails:
            raise WorkerLost("CUDA failed", call=call, said=self.fails.pop(call))
