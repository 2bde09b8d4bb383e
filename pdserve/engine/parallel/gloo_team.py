"""A team over torch.distributed's gloo, on this host's loopback: ranks on CPUs."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from pdserve.engine.parallel.shard import Shard
from pdserve.engine.parallel.team import in_order

_Gloo: Any = distributed.ProcessGroupGloo  # torch's stubs lack its methods
# A rank that is so late in the middle of a step stands still: they all do the same work.
LATE_S = 60.0


_MOST = distributed.AllreduceOptions()
_MOST.reduceOp = distributed.ReduceOp.MAX  # type: ignore[assignment]  # by torch's own stubs
FROM_FIRST = distributed.BroadcastOptions()
FROM_FIRST.rootRank = 0


class GlooTeam:
    """Implements `Team`. The process group is this object's own: nothing of it is global."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self._group: Any = None
        self._store: Any = None
        self._to_first = distributed.GatherOptions()
        self._to_first.rootRank = 0
        self._token = torch.zeros(1)

    def join(self, meeting: int) -> None:
        """Meet the others, before the first step. Blocks until all have come; raises RuntimeError if one doesn't.

        meeting  descriptor of a file, empty at first, that each has open; to be left open, since the group's store goes
                 to it again at its end, by this number
        """
        options = _Gloo._Options()
        options._devices = [_Gloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=LATE_S)
        self._store = distributed.FileStore(f"/proc/self/fd/{meeting}", self.shard.size)  # type: ignore[attr-defined]
        self._group = _Gloo(self.store("gloo"), self.shard.rank, self.shard.size, options)
        self.meet()

    def store(self, name: str) -> Any:
        """Where the ranks of one group find each other, once they have joined."""
        return distributed.PrefixStore(name, self._store)  # type: ignore[attr-defined]

    def add_up(self, x: Tensor) -> Tensor:
        self._joined.allreduce([x]).wait()
        return x

    def side_by_side(self, part: Tensor) -> Tensor:
        part = part.contiguous()
        if self.shard.rank != 0:
            self._joined.gather([], [part], self._to_first).wait()
            return part
        parts = [torch.empty_like(part) for _ in range(self.shard.size)]
        self._joined.gather([parts], [part], self._to_first).wait()
        return torch.cat(parts, dim=1)

    def from_first(self, x: Tensor) -> Tensor:
        self._joined.broadcast([x], FROM_FIRST).wait()
        return x

    def most(self, value: float) -> float:
        largest = torch.tensor([value], dtype=torch.float64)
        self._joined.allreduce([largest], _MOST).wait()
        return float(largest)

    def meet(self) -> None:
        self._joined.allreduce([self._token]).wait()

    @property
    def _joined(self) -> Any:
        assert self._group is not None, "joined before the first step"
        return self._group


class OrderedGlooTeam(GlooTeam):
    """Adds up in order of rank, in float32: gloo's own sum of more than two depends on where a number lies in a step.
    A row's bits are then its own (deterministic mode)."""

    def add_up(self, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(self.shard.size)]
        self._joined.allgather([parts], [x]).wait()
        return in_order(parts)
