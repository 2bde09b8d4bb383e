"""What the ranks of one model do together in a step; all of them call the same methods in the same order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from pdserve.engine.parallel.shard import Shard


class Team(Protocol):
    """One rank's side. Engine owner's thread only. Raises RuntimeError if another rank has gone, or is too late."""

    @property
    def shard(self) -> Shard: ...

    def add_up(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, the same bits at each; may overwrite x, which is contiguous."""
        ...

    def side_by_side(self, part: Tensor) -> Tensor:
        """All ranks' parts as one, at rank 0: [rows, width] → [rows, size · width]; at others any such tensor."""
        ...

    def from_first(self, x: Tensor) -> Tensor:
        """Rank 0's x, at each; overwrites the others', which have its shape and dtype."""
        ...

    def most(self, value: float) -> float:
        """The largest of all ranks' values. Waits for them."""
        ...

    def meet(self) -> None:
        """Returns when every rank has come here."""
        ...


def in_order(parts: Sequence[Tensor]) -> Tensor:
    """The sum of all ranks' parts: added in order of rank, in float32, and rounded to their dtype once."""
    total = parts[0].to(torch.float32, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(parts[0].dtype)


class Alone:
    """A team of one."""

    shard = Shard()

    def add_up(self, x: Tensor) -> Tensor:
        return x

    def side_by_side(self, part: Tensor) -> Tensor:
        return part

    def from_first(self, x: Tensor) -> Tensor:
        return x

    def most(self, value: float) -> float:
        return value

    def meet(self) -> None:
        return


ALONE = Alone()
