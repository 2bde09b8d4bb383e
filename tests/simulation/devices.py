"""The device of one simulated process, where its links go by one: one for all roles that it takes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from kv_transfer.transports.cuda_ipc import IpcDevice
from kv_transfer.transports.nccl import ControlNetwork, NcclNetwork
from kv_transfer.transports.nccl_device import NcclDevice
from kv_transfer.transports.port import Network
from kv_transfer.transports.staging import Staging
from pdserve.clock import Clock
from tests.support.loop_copies import LoopCopies
from tests.support.loop_cuda_ipc import LoopCudaIpc
from tests.support.loop_nccl import LoopNccl
from tests.support.memories import DeviceMemory, StagedMemory
from tests.support.memory_channel import DeviceWatch, WireKind

if TYPE_CHECKING:
    from tests.simulation.cluster import SimCluster

_NUM_SPARE_SLOTS = 4


class ProcessDevice:
    """ipc: passes the pool to others of the host, if links go by that; staging: what pieces go through, if they do."""

    def __init__(self, cluster: SimCluster, worker_id: str, clock: Clock) -> None:
        self.ipc: IpcDevice | None = None
        self.staging: Staging | None = None
        self._cluster = cluster
        self._worker_id = worker_id
        self._clock = clock
        self._loop: LoopNccl | LoopCudaIpc | None = None
        self._nccl: NcclDevice | None = None
        self._copies: LoopCopies | None = None

    def stage(self, memory: DeviceMemory, block_bytes: int, watch: DeviceWatch) -> Staging:
        """The pinned memory of the process, hardly more than one piece for each link."""
        cluster = self._cluster
        if self.staging is None:
            copies = self._copies = LoopCopies(
                memory,
                schedule=asyncio.get_running_loop().call_later,
                delay=cluster.drawn(f"{self._worker_id}/copies", 2 * cluster.delays.link_s),
                wake=lambda: None,
                watch=watch,
            )
            max_links = cluster.config.worker.max_links
            self.staging = Staging(
                copies,
                memory,
                block_bytes=block_bytes,
                staging_bytes=(max_links + _NUM_SPARE_SLOTS) * block_bytes,
                max_links=max_links,
                clock=self._clock,
                lease_s=cluster.config.timeouts.lease_s,
            )
        return self.staging

    def take(self, memory: StagedMemory, wake: Callable[[], None], watch: DeviceWatch) -> None:
        """A transfer owner begins, the first or the next one of the process."""
        cluster, timeouts = self._cluster, self._cluster.config.timeouts
        if self._copies is not None:
            self._copies.wake = wake
        if self._loop is not None:
            self._loop.memory, self._loop.wake = memory, wake
        elif cluster.delays.kind is WireKind.NCCL:
            nccl = self._loop = LoopNccl(cluster.nccl, self._worker_id, memory, wake=wake, watch=watch)
            self._nccl = NcclDevice(nccl, clock=self._clock, timeouts=timeouts, max_comms=16)
        elif cluster.delays.kind is WireKind.CUDA_IPC:
            ipc = self._loop = LoopCudaIpc(cluster.ipc, self._worker_id, memory, wake=wake, watch=watch)
            self.ipc = IpcDevice(ipc, clock=self._clock, lease_s=timeouts.lease_s)

    def over(self, node: ControlNetwork) -> Network:
        """The network of that transfer owner."""
        return node if self._nccl is None else NcclNetwork(node, self._nccl)

    def die(self) -> None:
        """With its process."""
        for device in (self._loop, self._copies):
            if device is not None:
                device.die()
