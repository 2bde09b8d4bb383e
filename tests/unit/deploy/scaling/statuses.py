"""Statuses of routers, as a test wants them."""

from __future__ import annotations

from pdserve.block_messages import BlockCounts
from pdserve.figures import NOTHING_COUNTED, RouterFigures
from pdserve.status import ClusterStatus, QueueStatus, WorkerStatus

IDLE = BlockCounts(60, 0, 0, 40, 0)


def worker(
    name: str,
    *,
    state: str = "up",
    blocks: BlockCounts = IDLE,
    running: int = 0,
    waiting: int = 0,
    queued_tokens: int = 0,
    tokens_per_s: float = 0.0,
    step_s: float = 0.0,
    epoch: str = "1.0000000000000001",
    role_generation: int = 1,
    role: str = "",
) -> WorkerStatus:
    """Its role is in its name, before the dash."""
    return WorkerStatus(
        id=name,
        role=role or name.partition("-")[0],
        epoch=epoch,
        role_generation=role_generation,
        state=state,
        blocks=blocks,
        num_running=running,
        num_waiting=waiting,
        num_queued_tokens=queued_tokens,
        num_cache_hit_tokens=0,
        num_cache_query_tokens=0,
        metrics_address="",
        numerics="",
        num_steps=1,
        prefill_tokens_per_s=tokens_per_s,
        step_s=step_s,
        slowest_step_s=step_s,
    )


def status(
    *workers: WorkerStatus,
    router: str = "r",
    waiting: int = 0,
    waiting_tokens: int = 0,
    figures: RouterFigures = NOTHING_COUNTED,
) -> ClusterStatus:
    queue = QueueStatus(num_waiting=waiting, num_waiting_tokens=waiting_tokens, num_running=0, limit=1024)
    return ClusterStatus(
        router_id=router, draining=False, workers=workers, pairs=(), queue=queue, figures=figures
    )
