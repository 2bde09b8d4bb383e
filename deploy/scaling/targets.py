"""What scaling is asked to keep: how many workers a pool may have, and the times that its load is held against."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from pdserve.messages import Role
from pdserve.service.scaling_config import ScalingConfig
from pdserve.service.settings import ConfigError

_RANGE = re.compile(r"([0-9]{1,9})(?:\.\.([0-9]{1,9}))?")
# Of one role: beyond that it is a slip of the finger.
MOST_WORKERS = 1024
SCALED = (Role.PREFILL, Role.DECODE)


@dataclass(frozen=True, slots=True)
class Range:
    """How many workers a pool may have. Scaling never takes the last of a role, so none begins at 0; 0..0: no pool."""

    least: int
    most: int

    def __post_init__(self) -> None:
        if self.least > self.most:
            raise ConfigError(f"the range {self} ends below its start: {self.least} is more than {self.most}")
        if self.most > MOST_WORKERS:
            raise ConfigError(f"the range {self} is beyond {MOST_WORKERS}, the most workers of a role")
        if self.least < (1 if self.most else 0):
            raise ConfigError(
                f"the range {self} begins below 1: scaling never takes the last worker of a role"
            )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Of "2..5", or "3" for exactly so many. Raises ConfigError which says what is wrong with it."""
        match = _RANGE.fullmatch(text.strip())
        if match is None:
            raise ConfigError(f"want a number of workers or LEAST..MOST, got {text!r}")
        return cls(int(match[1]), int(match[2] or match[1]))

    def __str__(self) -> str:
        return f"{self.least}" if self.is_fixed else f"{self.least}..{self.most}"

    @property
    def is_fixed(self) -> bool:
        """Whether there is nothing to decide."""
        return self.least == self.most


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingTargets:
    """Of one cluster.

    how  times and limits; `change_roles` must be off where an actuator can't do it
    """

    prefill: Range
    decode: Range
    how: ScalingConfig

    @property
    def most(self) -> int:
        """Workers of both pools together."""
        return self.prefill.most + self.decode.most

    def __str__(self) -> str:
        return f"{self.prefill} prefill + {self.decode} decode"

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
