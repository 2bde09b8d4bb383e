"""What a role is to the rest of a worker: a core made of parts, and limits for the one scheduler."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pdserve.clock import Clock
from pdserve.engine.engine import Engine
from pdserve.engine.scheduler import EngineLimits
from pdserve.ids import Random
from pdserve.messages import Role
from pdserve.owner import Owner, Post
from pdserve.service.config import Config, EngineConfig
from pdserve.tracing import Tracer
from pdserve.worker.metered_runner import MeteredRunner


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreParts:
    """What the core of any role is made of.

    meter        the engine's runner
    to_transfer  to the transfer owner; to_loop  to the event loop
    random       for ids that this core gives away
    """

    engine: Engine
    meter: MeteredRunner
    to_transfer: Post
    to_loop: Post
    clock: Clock
    random: Random
    config: Config
    tracer: Tracer = field(default_factory=Tracer.off)


class RoleCore(Owner, Protocol):
    """The engine owner in one role."""

    @property
    def attempts(self) -> Sequence[object]:
        """All that are in hand, oldest first; for tests and simulations."""
        ...


Roles = Mapping[Role, Callable[[CoreParts], RoleCore]]
"""The roles that a worker can take, and what makes the core of each."""


PREFILL_STEPS = 5  # of steps with prefills, within the time in which a router wants to see progress


def limits_of(role: Role, config: EngineConfig, prefill_progress_s: float) -> EngineLimits:
    """The engine's limits in a role.

    A batch takes at least one token a row and leaves one for a prompt, so max_step_tokens bounds max_batch too.
    """
    max_batch = max(1, min(config.max_batch, config.max_step_tokens - 1))
    decodes_only = role is Role.DECODE
    return EngineLimits(
        max_step_tokens=max(config.max_step_tokens, 2),
        max_batch=max_batch,
        chunk_tokens=config.max_step_tokens,
        decode_prefill_tokens=config.decode_prefill_tokens if decodes_only else None,
        prefill_step_s=prefill_progress_s / PREFILL_STEPS,
        recompute_max_tokens=config.recompute_max_tokens if decodes_only else None,
        prefix_cache=config.prefix_cache,
    )
