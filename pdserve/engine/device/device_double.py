"""torch's CPU device in a GPU's place, in real processes, to try what a cluster of GPUs does: PDSERVE_DEVICE=double."""

from __future__ import annotations

import torch
from torch import Tensor

from pdserve.engine.device.devices import CpuDevice
from pdserve.kv_memory import KvMemory
from pdserve.memfd import MemfdMemory


class DevicePoolDouble(MemfdMemory):
    """The pool of a `DeviceDouble`: other processes may map it, as they may a GPU's."""

    def export(self, transport: str) -> int | None:
        return None


class DeviceDouble(CpuDevice):
    """`CpuDevice` in a worker, on one thread: a rank is to the others what a GPU is."""

    def enter(self) -> None:
        torch.set_num_threads(1)

    def pool(self, num_bytes: int, spare_bytes: int) -> tuple[Tensor, KvMemory]:
        memory = DevicePoolDouble(num_bytes + spare_bytes, others_write=True)
        values = torch.frombuffer(memory.bytes, dtype=torch.uint8)
        memory.num_bytes = num_bytes
        return values, memory
