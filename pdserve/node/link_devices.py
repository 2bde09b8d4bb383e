"""The devices of a worker whose links go over NCCL, by CUDA IPC, or through pinned memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from kv_transfer.link_facts import STREAM
from kv_transfer.metrics import DeviceCounts
from kv_transfer.transports.cuda_driver import CudaDriver
from kv_transfer.transports.cuda_ipc import IpcDevice
from kv_transfer.transports.cuda_ipc_driver import DriverIpc
from kv_transfer.transports.cuda_ipc_port import CUDA_IPC, CudaIpc
from kv_transfer.transports.libnccl import LibNccl, load_nccl
from kv_transfer.transports.nccl import ControlNetwork, NcclNetwork
from kv_transfer.transports.nccl_device import NcclDevice
from kv_transfer.transports.nccl_port import NCCL, Nccl
from kv_transfer.transports.port import Network
from kv_transfer.transports.staged import StagedNetwork
from kv_transfer.transports.staging import Staging
from kv_transfer.transports.staging_driver import DriverCopies
from kv_transfer.transports.staging_port import HostCopies
from pdserve.clock import Clock
from pdserve.engine.parallel.parted_pool import PartedPool
from pdserve.errors import Incompatible, WorkerLost
from pdserve.kv_memory import DeviceMemory, KvMemory
from pdserve.node.cuda_ipc_double import CudaIpcDouble
from pdserve.node.nccl_double import NcclDouble
from pdserve.node.parted_copies import PartedCopies
from pdserve.node.rank_pools import copies_of
from pdserve.node.staging_double import StagingDouble
from pdserve.service.config import Config

_NCCL_DOUBLE, _IPC_DOUBLE, _STAGING_DOUBLE = "PDSERVE_NCCL", "PDSERVE_CUDA_IPC", "PDSERVE_STAGING"

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class LinkDevices:
    """For all links of this process. None: no link goes that way."""

    nccl: NcclDevice | None
    ipc: IpcDevice | None
    staging: Staging | None

    def seen(self, pool: KvMemory) -> KvMemory:
        """The pool as the links see it."""
        return pool if self.staging is None else self.staging.memory

    def over(self, stream: ControlNetwork) -> Network:
        """Their network: that of their connections, whose pieces may go elsewhere."""
        links: Network = stream if self.nccl is None else NcclNetwork(stream, self.nccl)
        return links if self.staging is None else StagedNetwork(links, self.staging)

    def counts(self) -> DeviceCounts:
        """Any thread."""
        nccl, ipc, staging = self.nccl, self.ipc, self.staging
        return DeviceCounts(
            num_communicators=0 if nccl is None else nccl.num_live,
            num_freed_communicators=0 if nccl is None else nccl.num_ended,
            num_mapped_pools=0 if ipc is None else ipc.num_mapped,
            num_pending_reads=0 if ipc is None else ipc.num_pending_reads,
            staging_bytes=0 if staging is None else staging.used_bytes,
            num_staging_copies=0 if staging is None else staging.num_pending,
        )


def open_devices(config: Config, memory: KvMemory, block_bytes: int, clock: Clock) -> LinkDevices:
    """What transport.kinds takes. block_bytes: of a block there. Raises Incompatible: why it can't be used here."""
    kinds = config.transport.kinds
    return LinkDevices(
        nccl=_open_nccl(config, memory, clock) if NCCL in kinds else None,
        ipc=_open_ipc(config, memory, clock) if CUDA_IPC in kinds else None,
        staging=_open_staging(config, memory, block_bytes, clock) if STREAM in kinds else None,
    )


def _open_nccl(config: Config, memory: KvMemory, clock: Clock) -> NcclDevice:
    if config.transport.link_tls:
        raise Incompatible(
            "transport.link_tls can't be kept with nccl in transport.kinds: it doesn't encrypt"
        )
    return NcclDevice(
        _make_nccl(memory), clock=clock, timeouts=config.timeouts, max_comms=config.worker.max_links
    )


def _make_nccl(memory: KvMemory) -> Nccl:
    if _is_double(_NCCL_DOUBLE):
        return NcclDouble(memory)
    device, cuda = _on_cuda(memory, NCCL)
    library = load_nccl()
    log.info("nccl.loaded", version=".".join(map(str, library.version)), path=library.path)
    return LibNccl(library, cuda, address=device.device_address, run_beside=_run_beside)


def _open_ipc(config: Config, memory: KvMemory, clock: Clock) -> IpcDevice:
    ipc: CudaIpc = CudaIpcDouble(memory) if _is_double(_IPC_DOUBLE) else _make_ipc(memory)
    try:
        return IpcDevice(ipc, clock=clock, lease_s=config.timeouts.lease_s)
    except WorkerLost as error:
        raise Incompatible(
            "transport.kinds has cuda_ipc, but the KV pool can't be exported", said=error
        ) from error


def _make_ipc(memory: KvMemory) -> CudaIpc:
    device, cuda = _on_cuda(memory, CUDA_IPC)
    return DriverIpc(cuda, device)


def _open_staging(config: Config, memory: KvMemory, block_bytes: int, clock: Clock) -> Staging | None:
    """None: the host sees the pool."""
    if isinstance(memory, PartedPool):
        copies: HostCopies = PartedCopies(memory, [copies_of(pool) for pool in memory.pools])
    elif _is_double(_STAGING_DOUBLE):
        copies = StagingDouble(memory)
    elif memory.device == "cpu":
        return None
    else:
        device, cuda = _on_cuda(memory, STREAM)
        copies = DriverCopies(cuda, device)
    return staging_by(copies, config, memory, block_bytes, clock)


def staging_by(
    copies: HostCopies, config: Config, memory: KvMemory, block_bytes: int, clock: Clock
) -> Staging:
    """Raises Incompatible if there isn't so much memory to pin, or it is too little for so many links."""
    try:
        return Staging(
            copies,
            memory,
            block_bytes=block_bytes,
            staging_bytes=config.transport.staging_bytes,
            max_links=config.worker.max_links,
            clock=clock,
            lease_s=config.timeouts.lease_s,
        )
    except WorkerLost as error:
        raise Incompatible(
            "transport.staging_bytes can't be pinned", bytes=config.transport.staging_bytes, said=error
        ) from error


def _is_double(variable: str) -> bool:
    if os.environ.get(variable) != "double":
        return False
    log.warning("transport.double", reason=f"{variable}=double: KV moves through memory of this host")
    return True


def _on_cuda(memory: KvMemory, kind: str) -> tuple[DeviceMemory, CudaDriver]:
    """The device that the pool is on."""
    if not isinstance(memory, DeviceMemory):
        raise Incompatible(
            f"transport.kinds has {kind}, but the KV pool isn't on a CUDA device", device=memory.device
        )
    return memory, CudaDriver.open(int(memory.device.partition(":")[2] or 0))


def _run_beside(call: Callable[[], None]) -> None:
    threading.Thread(target=call, name="nccl-abort", daemon=True).start()
