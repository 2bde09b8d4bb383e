"""How many workers a pool's load asks for, before any bound, patience or cool-down. Pure.

Prefill by the seconds that prompts queue, held against a share of the TTFT target. Decode by the blocks that are held,
and by what a step takes, held against the ITL target. More workers than requests are of no use to anybody.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from deploy.scaling.observe import Observed, PoolSeen
from pdserve.messages import Role
from pdserve.service.scaling_config import ScalingConfig


@dataclass(frozen=True, slots=True)
class PoolDemand:
    """Of one pool.

    wanted  workers that would do, above those that are ready; not above them = these do
    spare   whether one fewer would do as well: never of what isn't known
    says    the figures behind it, in words
    """

    wanted: int
    spare: bool
    says: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What earlier looks have taught.

    tokens_per_s         of one prefill worker; a new one has no figure of its own yet. 0 = not known
    prompt_tokens_per_s  computed of late in the whole cluster, smoothed; None = not known
    least_step_s         the shortest mean step of the decode pool: what a step takes with next to nothing in it
    """

    tokens_per_s: float = 0.0
    prompt_tokens_per_s: float | None = None
    least_step_s: float = math.inf


def prefill_demand(seen: Observed, known: Known, how: ScalingConfig) -> PoolDemand:
    """What the prompts in hand ask for."""
    pool, limit_s = seen.pool(Role.PREFILL), how.queue_share * how.ttft_target_s
    num_ready, rate = pool.num_ready, known.tokens_per_s
    if not num_ready:
        return PoolDemand(0, False, "no worker takes work")
    waits_for_decode = _is_full(seen, how) and _queue_s(pool.num_queued_tokens, num_ready, rate) <= limit_s
    num_waiting, num_waiting_tokens = (
        (0, 0) if waits_for_decode else (seen.num_waiting, seen.num_waiting_tokens)
    )
    num_tokens = pool.num_queued_tokens + num_waiting_tokens
    stock_s = _queue_s(num_tokens, num_ready, rate)
    queue_s = stock_s if waits_for_decode else max(stock_s, _finite(seen.queue_s, how.ttft_target_s))
    most_useful = max(num_ready, pool.num_requests + num_waiting)
    wanted = min(most_useful, _ceil(num_ready * queue_s / limit_s))
    spare = (
        _is_known(pool)
        and _queue_s(num_tokens, num_ready - 1, rate) <= how.spare_below * limit_s
        and queue_s <= how.spare_below * limit_s
        and _busy(known, num_ready - 1) <= how.spare_below
    )
    return PoolDemand(wanted, spare, f"prompts queue {queue_s:.2f} s of {limit_s:.2g} s")


def decode_demand(seen: Observed, known: Known, how: ScalingConfig) -> PoolDemand:
    """What the running sequences, and those that wait for blocks, ask for."""
    pool = seen.pool(Role.DECODE)
    num_ready, step_s = pool.num_ready, pool.step_s
    if not num_ready:
        return PoolDemand(0, False, "no worker takes work")
    num_outside = seen.num_waiting if _is_full(seen, how) else 0
    num_requests = pool.num_requests + num_outside
    num_running = max(1, num_requests - pool.num_waiting - num_outside)
    pressure = max(
        pool.occupancy / how.max_occupancy,
        step_s / how.itl_target_s,
        num_requests / num_running if num_requests > num_running else 0.0,
    )
    wanted = min(max(num_ready, num_requests), _ceil(num_ready * pressure))
    spare = _is_known(pool) and not pool.num_unmeasured and num_ready > 1 and num_requests <= num_running
    if spare:
        more = num_ready / (num_ready - 1)
        alone = num_requests <= num_ready - 1  # each still has a worker to itself
        least_s = min(known.least_step_s, step_s)
        spare = pool.occupancy * more <= how.spare_below * how.max_occupancy and (
            alone or least_s + (step_s - least_s) * more <= how.spare_below * how.itl_target_s
        )
    waiting = f", {num_requests - num_running} wait" if num_requests > num_running else ""
    step = (
        f"a step takes {step_s * 1e3:.3g} ms of {how.itl_target_s * 1e3:.3g} ms" if step_s else "nothing runs"
    )
    held = f"{pool.occupancy:.0%} of {how.max_occupancy:.0%} of the blocks are held"
    return PoolDemand(wanted, spare, f"{held}, {step}{waiting}")


def _is_known(pool: PoolSeen) -> bool:
    """Whether each worker that takes work has reported."""
    return pool.num_ready > 0 and pool.num_untold == 0


def _is_full(seen: Observed, how: ScalingConfig) -> bool:
    """Whether it is decode workers that requests in the routers' queues wait for."""
    pool = seen.pool(Role.DECODE)
    return pool.num_waiting > 0 or pool.occupancy >= how.max_occupancy


def _queue_s(num_tokens: int, num_workers: int, tokens_per_s: float) -> float:
    """How long so many tokens take; without a rate nobody can say, and what is measured must do."""
    if not num_tokens:
        return 0.0
    if num_workers < 1:
        return math.inf
    return num_tokens / (num_workers * tokens_per_s) if tokens_per_s > 0 else 0.0


def _busy(known: Known, num_workers: int) -> float:
    """The part of their time in which so many prefill workers would compute what comes."""
    if known.prompt_tokens_per_s is None or num_workers < 1:
        return math.inf
    if known.prompt_tokens_per_s <= 0:
        return 0.0
    return (
        known.prompt_tokens_per_s / (num_workers * known.tokens_per_s) if known.tokens_per_s > 0 else math.inf
    )


def _finite(measured_s: float | None, target_s: float) -> float:
    """A percentile above the last bucket is as good as many targets."""
    return 0.0 if measured_s is None else min(measured_s, 100 * target_s)


def _ceil(value: float) -> int:
    """Up, but for what is only rounding."""
    return math.ceil(min(value, 1e6) - 1e-9)
