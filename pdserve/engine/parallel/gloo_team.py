"""A team over torch.distributed's gloo, on this host's loopback: ranks on CPUs."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from pdserve.engine.parallel.shard import Shard

_Gloo: Any = distributed.ProcessGroupGloo  # torch's stubs lack its methods
# A rank that is so late in the middle of a step stands still: they all do the same work.
_LATE_S = 60.0


class GlooTeam:
    """Implements `Team`. The process group is this object's own: nothing of it is global."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self._group: Any = None
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
        options._timeout = timedelta(seconds=_LATE_S)
        store = distributed.FileStore(f"/proc/self/fd/{meeting}", self.shard.size)  # type: ignore[attr-defined]
        self._group = _Gloo(store, self.shard.rank, self.shard.size, options)
        self.meet()

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

    def meet(self) -> None:
        self._joined.allreduce([self._token]).wait()

    @property
    def _joined(self) -> Any:
        assert self._group is not None, "joined before the first step"
        return self._group
