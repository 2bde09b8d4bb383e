"""P's pool on a GPU of the same host, read by D: mapped once, copied on D's stream, known to be read by an event.

    D  MEMORY{handle} has come -> mapped    READY -> copies, event    the event is over -> `on_done`, ACK
    P  exported                             RELEASING until RELEASED, or the end of the link

Whatever ends a lease or a link, a copy that was begun goes on: D's blocks stay QUARANTINED, and P's pool mapped, until
the event behind it is over (device_copies.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kv_transfer.transports.cuda_ipc_port import CUDA_IPC, CudaIpc
from kv_transfer.transports.device_copies import DeviceCopies
from kv_transfer.transports.port import RemoteRead
from pdserve.clock import Clock
from pdserve.errors import InvariantViolated

Send = Callable[[bytes], None]


@dataclass(slots=True, eq=False)
class _Mapped:
    """Another process's pool. num_users: connections that may read it; num_pending: copies under way."""

    handle: bytes
    mapping: int
    num_users: int = 0
    num_pending: int = 0


class IpcDevice:
    """All pools that one worker has mapped, and the copies from them. Transfer owner only.

    handle  names this worker's pool to others. Making one raises WorkerLost if the pool can't be exported.
    """

    def __init__(self, ipc: CudaIpc, *, clock: Clock, lease_s: float) -> None:
        self.handle = ipc.export()
        self._ipc = ipc
        self._mapped: dict[bytes, _Mapped] = {}
        self._copies = DeviceCopies(ipc, "a copy from another worker's pool", clock=clock, lease_s=lease_s)

    @property
    def num_pending_reads(self) -> int:
        """Any thread."""
        return self._copies.num_pending

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
        mapped.num_pending += 1
        self._copies.begin(partial(self._ipc.copy, mapped.mapping, reads), partial(self._over, mapped, told))

    def _over(self, mapped: _Mapped, told: Callable[[], None]) -> None:
        mapped.num_pending -= 1
        self._unmap_unused(mapped)
        told()

    def poll(self) -> None:
        """See what is done. Raises InvariantViolated when the device can't be trusted with memory any longer."""
        self._copies.poll()

    def _unmap_unused(self, mapped: _Mapped) -> None:
        if mapped.num_users == 0 and mapped.num_pending == 0:
            del self._mapped[mapped.handle]
            self._ipc.close(mapped.mapping)

    def next_due_s(self) -> float | None:
        return self._copies.next_due_s()


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
