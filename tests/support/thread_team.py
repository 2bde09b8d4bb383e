"""A team of ranks that are threads of one process, and a whole parallel model made of them.

A thread that is waited for longer than a test may take has died with an error, which `ThreadRanks` raises.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from pdserve.engine.parallel.parallel_runner import ParallelRunner, follow_step
from pdserve.engine.parallel.shard import Shard
from pdserve.engine.torch_runner import TorchRunner
from pdserve.kv_memory import HostMemory

_LIMIT_S = 60.0


class Meeting:
    """Where the threads of one team put what they have."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=_LIMIT_S)
        self.given: list[Tensor] = [torch.empty(0)] * size
        self.num_sums = 0


class ThreadTeam:
    """Implements `Team`."""

    def __init__(self, shard: Shard, meeting: Meeting) -> None:
        self.shard = shard
        self._meeting = meeting

    def add_up(self, x: Tensor) -> Tensor:
        parts = self._all(x)
        if self.shard.rank == 0:
            self._meeting.num_sums += 1
        total = parts[0]
        for part in parts[1:]:  # in order of rank: the same bits at each
            total = total + part
        return total

    def side_by_side(self, part: Tensor) -> Tensor:
        parts = self._all(part)
        return torch.cat(parts, dim=1) if self.shard.rank == 0 else part

    def meet(self) -> None:
        self._meeting.barrier.wait()

    def _all(self, x: Tensor) -> list[Tensor]:
        self._meeting.given[self.shard.rank] = x.clone()
        self._meeting.barrier.wait()
        parts = list(self._meeting.given)
        self._meeting.barrier.wait()
        return parts


MakeRank = Callable[[ThreadTeam, Callable[[int], HostMemory]], TorchRunner]


class ThreadRanks:
    """A `ParallelRunner` over ranks that are threads and share one pool: `runner`."""

    def __init__(self, size: int, make_rank: MakeRank) -> None:
        self.meeting = Meeting(size)
        shared: list[HostMemory] = []

        def memory(num_bytes: int) -> HostMemory:
            if not shared:
                shared.append(HostMemory(num_bytes))
            assert shared[0].num_bytes == num_bytes, "all ranks see the same pool"
            return shared[0]

        self.ranks = [make_rank(ThreadTeam(Shard(rank, size), self.meeting), memory) for rank in range(size)]
        self._threads = ThreadPoolExecutor(max(1, size - 1))
        self._following: list[Future[None]] = []
        first = self.ranks[0]
        whole = first.whole_layout
        self._parts = [Shard(rank, size).kv_part(whole.kv_heads) for rank in range(size)]
        self.runner = ParallelRunner(first, whole, self._parts[0], size, self._tell)

    def _tell(self, order: bytes) -> None:
        for future in self._following:
            future.result(_LIMIT_S)
        self._following = [
            self._threads.submit(follow_step, rank, part, order)
            for rank, part in zip(self.ranks[1:], self._parts[1:], strict=True)
        ]

    def close(self) -> None:
        for future in self._following:
            future.result(_LIMIT_S)
        self._threads.shutdown()


def thread_ranks(folder: Path, size: int, **settings: object) -> ThreadRanks:
    """Of float32 `TorchRunner`s; settings: as of those."""
    from tests.unit.engine_torch.driving import make_runner

    return ThreadRanks(
        size,
        lambda team, memory: make_runner(folder, team=team, make_memory=memory, **settings),  # type: ignore[arg-type]
    )
