"""What a role means for the one scheduler."""

from __future__ import annotations

from pdserve.engine.scheduler import EngineLimits
from pdserve.messages import Role
from pdserve.service.config import EngineConfig


def limits_of(role: Role, config: EngineConfig) -> EngineLimits:
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
        recompute_max_tokens=config.recompute_max_tokens if decodes_only else None,
        prefix_cache=config.prefix_cache,
    )
