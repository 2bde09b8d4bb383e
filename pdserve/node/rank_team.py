"""How the ranks of a worker reach each other: over gloo on CPUs, over NCCL on GPUs."""

from __future__ import annotations

from pdserve.engine.device.devices import Device
from pdserve.engine.parallel.gloo_team import GlooTeam, OrderedGlooTeam
from pdserve.engine.parallel.nccl_team import NcclTeam
from pdserve.engine.parallel.shard import Shard
from pdserve.service.config import EngineConfig


def make_team(shard: Shard, device: Device | None, engine: EngineConfig) -> GlooTeam:
    """device: of this rank; None: the CPU."""
    if device is not None and device.torch_device.type == "cuda":
        return NcclTeam(shard, device)
    return OrderedGlooTeam(shard) if engine.deterministic else GlooTeam(shard)
