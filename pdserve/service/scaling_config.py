"""The settings of scaling, a table of the configuration (config.py); docs/scaling.md says how they act."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.fields import setting
from pdserve.service.settings import check_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingConfig:
    """How the numbers of workers follow the load, where a range of them is given."""

    ttft_target_s: float = setting(
        1.0, "time to first token that the prefill pool is scaled for", unit="s", above=0.0, most=3600.0
    )
    itl_target_s: float = setting(
        0.1, "gap between two tokens that the decode pool is scaled for", unit="s", above=0.0, most=3600.0
    )
    queue_share: float = setting(
        0.5,
        "part of ttft_target_s that prompts may queue before a prefill worker is added",
        above=0.0,
        most=1.0,
    )
    max_occupancy: float = setting(
        0.85,
        "part of its KV blocks that the decode pool may hold before a worker is added",
        above=0.0,
        most=1.0,
    )
    spare_below: float = setting(
        0.7, "a worker can go if what is left would be at no more than this part of its limits",
        above=0.0, most=0.95,
    )  # fmt: skip
    interval_s: float = setting(1.0, "between two looks at the routers", unit="s", least=0.05, most=600.0)
    grow_after_s: float = setting(
        2.0, "a limit must be exceeded for so long before a worker is added", unit="s", least=0.0, most=3600.0
    )
    cool_down_up_s: float = setting(
        5.0, "from added workers being ready to adding more; and how long a pool must be idle before one of its "
        "workers changes its role", unit="s", least=0.0, most=3600.0,
    )  # fmt: skip
    cool_down_down_s: float = setting(
        60.0, "a pool must be idle for so long, since its last change too, before a worker goes", unit="s",
        least=0.0, most=86_400.0,
    )  # fmt: skip
    max_step: int = setting(
        2, "most workers of a pool that are added at once; they go one at a time", least=1
    )
    start_limit_s: float = setting(
        300.0, "a worker that isn't ready after so long is not waited for before adding more", unit="s",
        least=1.0, most=86_400.0,
    )  # fmt: skip
    guard_s: float = setting(
        600.0, "a number of workers that proved too few is not gone back to for so long; twice as long each time",
        unit="s", least=0.0, most=86_400.0,
    )  # fmt: skip
    change_roles: bool = setting(
        True, "let an idle worker of one pool change over to the other, which is quicker than starting one"
    )

    def __post_init__(self) -> None:
        check_fields("scaling", self)
