"""P's pool on a GPU of the same host, read by D: mapped once, copied on D's stream, known to be read by an event.

    D  MEMORY{handle} has come -> mapped    READY -> copies, event    the event is over -> `on_done`, ACK
    P  exported                             RELEASING until RELEASED, or the end of the link

Whatever ends a lease or a link, a copy that was begun goes on: D's blocks stay QUARANTINED, and P's pool mapped, until
the event behind it is over. If that takes lease_s, or the device has failed, nobody knows what may still be written:
the process must end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kv_transfer.transports.cuda_ipc_port import CUDA_IPC, CudaIpc
from kv_transfer.transports.port import RemoteRead
from pdserve.clock import Clock
from pdserve.errors import InvariantViolated, WorkerLost

_POLL_LEAST_S, _POLL_MOST_S = 0.00005, 0.01
_POLL_SHARE = 0.25  # of what it has taken so far, whatever is waited for

Send = Callable[[bytes], None]


@dataclass(slots=True, eq=False)
class _Mapped:
    """Another process's pool. num_users: connections that may read it; num_pending: copies under way."""

    handle: bytes
    mapping: int
    num_users: int = 0
    num_pending: int = 0


@dataclass(slots=True, eq=False)
class _Copying:
    """One `read`."""

    event: int
    began_s: float
    mapped: _Mapped
    told: Callable[[], None]


class IpcDevice:
    """All pools that one worker has mapped, and the copies from them. Transfer owner only.

    handle  names this worker's pool to others. Making one raises WorkerLost if the pool can't be exported.
    """

    def __init__(self, ipc: CudaIpc, *, clock: Clock, lease_s: float) -> None:
        self.handle = ipc.export()
        self._ipc = ipc
        self._clock = clock
        self._lease_s = lease_s
        self._mapped: dict[bytes, _Mapped] = {}
        self._copying: deque[_Copying] = deque()  # in the stream's order
        self._looked_s = clock.now_s()
        self._failed: WorkerLost | None = None

    @property
    def num_pending_reads(self) -> int:
        """Any thread."""
        return len(self._copying)

    @property
    def num_mapped(self) -> int:
        """Pools of others that are mapped. Any thread."""
        return len(self._mapped)

    def share(self, send: Send) -> IpcSharing:
        """For one more connection of this worker."""
        return IpcSharing(self, send)

    def enter(self, handle: bytes, num_bytes: int) -> _Mapped:
        """One connection more reads this pool. Raises InvalidRequest or WorkerLost: why it can't."""
        mapped = self._mapped.get(handle)
        if mapped is None:
            mapped = self._mapped[handle] = _Mapped(handle, self._ipc.open(handle, num_bytes))
        mapped.num_users += 1
        return mapped

    def leave(self, mapped: _Mapped) -> None:
        """It begins no more copies from there."""
        mapped.num_users -= 1
        self._unmap_unused(mapped)

    def read(self, mapped: _Mapped, reads: Sequence[RemoteRead], told: Callable[[], None]) -> None:
        """Begin copies; told: called by `poll` when they are over, also after it has raised WorkerLost."""
        now_s = self._clock.now_s()
        if not self._copying:
            self._looked_s = now_s
        try:
            self._ipc.copy(mapped.mapping, reads)
        finally:  # some may have begun before one failed
            mapped.num_pending += 1
            self._copying.append(_Copying(self._record(), now_s, mapped, told))

    def _record(self) -> int:
        try:
            return self._ipc.record()
        except WorkerLost as error:
            self._failed = error
            raise

    def poll(self) -> None:
        """See what is done. Raises InvariantViolated when the device can't be trusted with memory any longer."""
        now_s = self._clock.now_s()
        if now_s >= self._looked_s + self._lease_s / 2:
            self._stood_still(now_s)
        self._looked_s = now_s
        try:
            self._end_copies()
        except WorkerLost as error:
            self._failed = error
        if self._failed is not None:
            raise InvariantViolated(
                "the device failed at a copy from another worker's pool", said=self._failed
            )
        if self._copying and now_s >= self._copying[0].began_s + self._lease_s:
            raise InvariantViolated(
                "a copy from another worker's pool doesn't end: the device may still write memory that is in use",
                waited_s=round(now_s - self._copying[0].began_s, 3),
            )

    def _end_copies(self) -> None:
        while self._copying and self._ipc.is_over(self._copying[0].event):
            copying = self._copying.popleft()
            copying.mapped.num_pending -= 1
            self._unmap_unused(copying.mapped)
            copying.told()

    def _stood_still(self, now_s: float) -> None:
        """Not the device but this process, stopped and continued: it has seen nothing of the time that passed."""
        for copying in self._copying:
            copying.began_s = now_s

    def _unmap_unused(self, mapped: _Mapped) -> None:
        if mapped.num_users == 0 and mapped.num_pending == 0:
            del self._mapped[mapped.handle]
            self._ipc.close(mapped.mapping)

    def next_due_s(self) -> float | None:
        """A device wakes nobody."""
        if not self._copying:
            return None
        now_s = self._clock.now_s()
        waited_s = now_s - self._copying[0].began_s
        return now_s + min(max(waited_s * _POLL_SHARE, _POLL_LEAST_S), _POLL_MOST_S)


class IpcSharing:
    """One end of one connection: the Sharing of the port."""

    kind = CUDA_IPC
    is_at_once = False

    def __init__(self, device: IpcDevice, send: Send) -> None:
        self.is_read = False
        self.num_pending = 0
        self._device = device
        self._send = send
        self._mapped: _Mapped | None = None
        self._over: deque[int] = deque()

    def export(self) -> bytes:
        return self._device.handle

    def pass_memory(self, wire: bytes) -> None:
        self._send(wire)

    def begin(self) -> None:
        self.is_read = True

    def expect_memory(self) -> None:
        """All that it takes comes in the frame."""

    def take_memory(self, handle: bytes, num_bytes: int) -> None:
        self._mapped = self._device.enter(handle, num_bytes)
        self.is_read = True

    def read(self, tag: int, reads: Sequence[RemoteRead]) -> bool:
        if self._mapped is None:
            raise InvariantViolated("the peer's pool isn't mapped", tag=tag)
        self.num_pending += 1
        self._device.read(self._mapped, reads, partial(self._done, tag))
        return False

    def _done(self, tag: int) -> None:
        self.num_pending -= 1
        self._over.append(tag)

    def take_over(self) -> Sequence[int]:
        over, self._over = self._over, deque()
        return over

    @property
    def is_idle(self) -> bool:
        return not (self.num_pending or self._over)

    def close(self) -> None:
        mapped, self._mapped = self._mapped, None
        if mapped is not None:
            self._device.leave(mapped)
