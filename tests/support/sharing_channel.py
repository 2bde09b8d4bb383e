"""An in-memory connection whose one end may read the other's pool by a device's copies (cuda_ipc)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kv_transfer.transports.cuda_ipc import IpcDevice, IpcSharing
from kv_transfer.transports.port import RemoteRead, Sink
from tests.support.memories import StagedMemory
from tests.support.memory_channel import MemoryChannel, Wires


class SharingChannel(MemoryChannel):
    """Two-sided until both ends have agreed that D reads."""

    sharing: IpcSharing

    def __init__(
        self,
        wires: Wires,
        *,
        name: str,
        peer_name: str,
        memory: StagedMemory,
        wake: Callable[[], None],
        device: IpcDevice,
    ) -> None:
        super().__init__(wires, name=name, peer_name=peer_name, memory=memory, wake=wake)
        self.sharing = device.share(self.send)

    @property
    def transport(self) -> str:
        return self.sharing.kind if self.sharing.is_read else super().transport

    @property
    def reads_itself(self) -> bool:
        return self.sharing.is_read

    @property
    def can_detach(self) -> bool:
        return not self.sharing.is_read

    def divert(self, tag: int) -> bool:
        return not self.sharing.is_read

    @property
    def is_idle(self) -> bool:
        return self.sharing.is_idle

    def read_remote(self, tag: int, reads: Sequence[RemoteRead]) -> bool:
        return self.sharing.read(tag, reads)

    def receive(self, sink: Sink) -> bool:
        for tag in self.sharing.take_over():
            sink.on_done(tag)
        return super().receive(sink)

    def close(self, reason: str) -> None:
        super().close(reason)
        self.sharing.close()
