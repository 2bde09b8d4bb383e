"""The runner of a CPU as a worker's settings want it: of a whole model, or of one rank's part."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import structlog

from pdserve.engine.kernel_caches import bound_kernel_caches
from pdserve.engine.native.library import why_none
from pdserve.engine.numerics import choose_precision
from pdserve.engine.parallel.team import ALONE, Team
from pdserve.engine.torch_runner import TorchRunner
from pdserve.kv_memory import HostMemory
from pdserve.modelstore.progress import ByteProgress
from pdserve.service.config import EngineConfig

log = structlog.get_logger()


def make_cpu_runner(
    folder: Path,
    engine: EngineConfig,
    *,
    make_memory: Callable[[int], HostMemory],
    progress: ByteProgress | None = None,
    team: Team = ALONE,
) -> TorchRunner:
    """team: as of `TorchRunner`; its ranks divide the worker's threads. Raises BadModel."""
    bound_kernel_caches()
    precision = choose_precision(engine.dtype, engine.linear, engine.kernels, engine.kernel_variant)
    num_threads = engine.threads or len(os.sched_getaffinity(0))
    runner = TorchRunner(
        folder,
        dtype=engine.dtype,
        deterministic=engine.deterministic,
        num_threads=max(1, num_threads // team.shard.size),
        num_blocks=engine.num_blocks or None,
        kv_memory_bytes=engine.kv_memory_bytes,
        block_size=engine.block_size,
        long_context=engine.long_context,
        precision=precision,
        progress=progress,
        make_memory=make_memory,
        team=team,
    )
    if precision.kernels is not None:
        log.info("kernels.native", variant=precision.kernels.variant)
    elif engine.kernels == "auto" and engine.linear == "auto" and precision.name == "bfloat16":
        log.info("kernels.torch", reason=f"compiled ones {why_none()}")
    return runner
