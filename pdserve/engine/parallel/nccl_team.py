"""A team over torch.distributed's NCCL, each rank on a GPU of its own; what the host asks goes over gloo.

Collectives are launched on the device, in the order in which the ranks launch steps, and graphs record them. A rank
that has gone shows on the host: its process is watched, and gloo's connections end.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from pdserve.engine.device.devices import Device
from pdserve.engine.parallel.gloo_team import FROM_FIRST, LATE_S, GlooTeam
from pdserve.engine.parallel.shard import Shard


class NcclTeam(GlooTeam):
    """Implements `Team`. Tensors lie on its device."""

    def __init__(self, shard: Shard, device: Device) -> None:
        super().__init__(shard)
        self._device = device
        self._nccl: Any = None

    def join(self, meeting: int) -> None:
        """See `GlooTeam.join`."""
        super().join(meeting)
        self._device.enter()
        kind: Any = distributed.ProcessGroupNCCL  # in builds of torch with CUDA
        options = kind.Options()
        options._timeout = timedelta(seconds=LATE_S)
        self._nccl = kind(self.store("nccl"), self.shard.rank, self.shard.size, options)
        self.add_up(torch.zeros(1, device=self._device.torch_device))  # sets up what no graph may record
        self.side_by_side(torch.zeros(1, 1, device=self._device.torch_device))
        self.from_first(torch.zeros(1, device=self._device.torch_device))
        self._device.mark().wait()

    def add_up(self, x: Tensor) -> Tensor:
        self._nccl.allreduce([x]).wait()  # has the device wait, not the host
        return x

    def side_by_side(self, part: Tensor) -> Tensor:
        rows, width = part.shape
        parts = part.new_empty(self.shard.size, rows, width)
        self._nccl._allgather_base(parts, part.contiguous()).wait()
        return parts.transpose(0, 1).reshape(rows, self.shard.size * width)

    def from_first(self, x: Tensor) -> Tensor:
        self._nccl.broadcast([x], FROM_FIRST).wait()
        return x
