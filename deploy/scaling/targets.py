"""What scaling is asked to keep: how many workers a pool may have, and the times that its load is held against."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from pdserve.messages import Role
from pdserve.service.scaling_config import ScalingConfig
from pdserve.service.settings import ConfigError

_RANGE = re.compile(r"(\d{1,6})(?:\.\.(\d{1,6}))?")
SCALED = (Role.PREFILL, Role.DECODE)


@dataclass(frozen=True, slots=True)
class Range:
    """How many workers a pool may have. Scaling never takes the last of a role, so `least` is 1 or more."""

    least: int
    most: int

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ConfigError(f"a range of workers must be LEAST..MOST with 1 <= LEAST <= MOST, got {self}")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Of "2..5", or "3" for exactly so many. Raises ConfigError which says what is wrong with it."""
        match = _RANGE.fullmatch(text.strip())
        if match is None:
            raise ConfigError(f"want a number of workers or LEAST..MOST, got {text!r}")
        least, most = int(match[1]), int(match[2] or match[1])
        if least > most:
            raise ConfigError(f"the range {text} ends below its start: {least} is more than {most}")
        if least < 1:
            raise ConfigError(
                f"the range {text} begins below 1: scaling never takes the last worker of a role"
            )
        return cls(least, most)

    def __str__(self) -> str:
        return f"{self.least}..{self.most}"

    def clamp(self, count: int) -> int:
        """The nearest number within."""
        return min(self.most, max(self.least, count))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingTargets:
    """Of one cluster.

    how  times and limits; `change_roles` must be off where an actuator can't do it
    """

    prefill: Range
    decode: Range
    how: ScalingConfig

    def range_of(self, role: Role) -> Range:
        """Of a scaled role."""
        return self.prefill if role is Role.PREFILL else self.decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Workers of each scaled role."""

    prefill: int
    decode: int

    def of(self, role: Role) -> int:
        return self.prefill if role is Role.PREFILL else self.decode

    def __str__(self) -> str:
        return f"{self.prefill} prefill + {self.decode} decode"
