"""The runner of a device as a worker's settings want it: of a whole model, or of one rank's part.

PDSERVE_DEVICE=double puts torch's CPU device in a GPU's place, to try what a cluster of GPUs does without one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import structlog

from pdserve.engine.device.device_double import DeviceDouble
from pdserve.engine.device.devices import Device, find_cuda
from pdserve.engine.device.runner import DeviceRunner, device_precision
from pdserve.engine.kernel_caches import bound_kernel_caches
from pdserve.engine.parallel.team import ALONE, Team
from pdserve.modelstore.progress import ByteProgress
from pdserve.service.config import EngineConfig

log = structlog.get_logger()


def find_device(wanted: str, rank: int = 0) -> Device | None:
    """As `find_cuda`, or the double."""
    if os.environ.get("PDSERVE_DEVICE") != "double":
        return find_cuda(wanted, rank)
    log.warning("engine.double", reason="PDSERVE_DEVICE=double: the engine of GPUs computes on the CPU")
    return DeviceDouble()


def make_device_runner(
    folder: Path,
    engine: EngineConfig,
    device: Device,
    *,
    progress: ByteProgress | None = None,
    team: Team = ALONE,
    on_loaded: Callable[[int], None] | None = None,
) -> DeviceRunner:
    """See `DeviceRunner`. Raises BadModel, Incompatible."""
    bound_kernel_caches()
    return DeviceRunner(
        folder,
        device,
        precision=device_precision(engine.dtype, engine.kv_dtype, device),
        num_blocks=engine.num_blocks or None,
        utilization=engine.gpu_memory_utilization,
        block_size=engine.block_size,
        max_step_tokens=engine.max_step_tokens,
        max_batch=engine.max_batch,
        long_context=engine.long_context,
        progress=progress,
        team=team,
        on_loaded=on_loaded,
    )
