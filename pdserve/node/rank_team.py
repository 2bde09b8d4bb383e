"""How the ranks of a worker reach each other: over gloo on CPUs, over NCCL on GPUs."""

from __future__ import annotations

from pdserve.engine.device.devices import Device
from pdserve.engine.parallel.gloo_team import GlooTeam
from pdserve.engine.parallel.nccl_team import NcclTeam
from pdserve.engine.parallel.shard import Shard


def make_team(shard: Shard, device: Device | None) -> GlooTeam:
    """device: of this rank; None: the CPU."""
    if device is not None and device.torch_device.type == "cuda":
        return NcclTeam(shard, device)
    return GlooTeam(shard)
