"""On what a step runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class GpuPlace:
    """prefill, decode: numbers of GPUs, the same for both workers on one. is_dry: without any, all smaller."""

    prefill: int
    decode: int
    folder: Path
    is_dry: bool = False

    def device(self, number: int) -> str:
        """As engine.device has it."""
        return "cpu" if self.is_dry else f"cuda:{number}"
