"""How rank 0's process gets at the KV pools of the other ranks' devices: its links copy to and from all of them."""

from __future__ import annotations

from collections.abc import Sequence

from kv_transfer.transports.cuda_driver import CudaDriver
from kv_transfer.transports.cuda_ipc_driver import DriverIpc, map_exported
from kv_transfer.transports.staging_driver import DriverCopies
from pdserve.kv_memory import AddressedMemory, DeviceMemory, KvMemory
from pdserve.memfd import RankMemory
from pdserve.node.parted_copies import PartCopies
from pdserve.node.rank_channel import RankPool
from pdserve.node.staging_double import StagingDouble


def exported(memory: KvMemory) -> tuple[RankPool, Sequence[int]]:
    """A rank's pool, and the descriptors that go with it. Raises WorkerLost with CUDA's words."""
    if isinstance(memory, DeviceMemory):
        handle = DriverIpc(open_driver(memory), memory).export()
        return RankPool(memory.num_bytes, memory.device, handle), ()
    from pdserve.engine.device.device_double import DevicePoolDouble

    assert isinstance(memory, DevicePoolDouble), "the double's pool"
    return RankPool(memory.num_bytes, memory.device, b""), (memory.descriptor,)


def mapped(pool: RankPool, descriptors: Sequence[int]) -> KvMemory:
    """What a rank has exported, in this process, for as long as that lives. Raises WorkerLost or InvalidRequest."""
    if not pool.handle:
        return RankMemory(descriptors[0], pool.num_bytes)
    cuda = CudaDriver.open(_ordinal(pool.device))
    _base, address = map_exported(cuda, pool.handle, pool.num_bytes)
    return AddressedMemory(address, pool.num_bytes, pool.device)


def copies_of(memory: KvMemory) -> PartCopies:
    """Between a rank's pool and pinned memory, on its device."""
    if isinstance(memory, DeviceMemory):
        return DriverCopies(open_driver(memory), memory)
    return StagingDouble(memory)


def open_driver(memory: DeviceMemory) -> CudaDriver:
    """Of its device. Raises Incompatible with the driver's words."""
    return CudaDriver.open(_ordinal(memory.device))


def _ordinal(device: str) -> int:
    return int(device.partition(":")[2] or 0)
