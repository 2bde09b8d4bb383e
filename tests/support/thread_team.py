"""A team of ranks that are threads of one process, and a whole parallel model made of them.

A thread that is waited for longer than a test may take has died with an error, which `ThreadRanks` raises.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from pdserve.engine.device.runner import DeviceRunner
from pdserve.engine.parallel.gloo_team import GlooTeam
from pdserve.engine.parallel.parallel_runner import Follower, Following, ParallelLaunches, ParallelRunner
from pdserve.engine.parallel.parted_pool import PartedPool
from pdserve.engine.parallel.shard import WHOLE, KvPart, Shard
from pdserve.engine.parallel.team import Team, in_order
from pdserve.engine.torch_runner import TorchRunner
from pdserve.kv_memory import HostMemory

_LIMIT_S = 60.0
R = TypeVar("R")


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
        return in_order(parts)

    def side_by_side(self, part: Tensor) -> Tensor:
        parts = self._all(part)
        return torch.cat(parts, dim=1) if self.shard.rank == 0 else part

    def from_first(self, x: Tensor) -> Tensor:
        return x.copy_(self._all(x)[0])

    def most(self, value: float) -> float:
        return max(float(each) for each in self._all(torch.tensor(value, dtype=torch.float64)))

    def meet(self) -> None:
        self._meeting.barrier.wait()

    def _all(self, x: Tensor) -> list[Tensor]:
        self._meeting.given[self.shard.rank] = x.clone()
        self._meeting.barrier.wait()
        parts = list(self._meeting.given)
        self._meeting.barrier.wait()
        return parts


class RankThreads:
    """The ranks behind the first, each a thread that computes what it is told of, one step after the other."""

    def __init__(self, followers: Sequence[Follower], parts: Sequence[KvPart]) -> None:
        self._following = [Following(follower, part) for follower, part in zip(followers, parts, strict=True)]
        self._threads = [ThreadPoolExecutor(1) for _ in followers]
        self._steps: list[Future[None]] = []

    def tell(self, order: bytes) -> None:
        for future in self._steps[: -2 * len(self._threads)]:
            future.result(_LIMIT_S)
        self._steps += [
            thread.submit(rank.step, order)
            for rank, thread in zip(self._following, self._threads, strict=True)
        ]

    def wait(self) -> None:
        """Until all have computed what they were told of."""
        for future in self._steps:
            future.result(_LIMIT_S)

    def close(self) -> None:
        self.wait()
        for thread in self._threads:
            thread.shutdown()


MakeRank = Callable[[Team, Callable[[int], HostMemory]], TorchRunner]


class GlooRanks:
    """Teams of threads that go over gloo, as processes do."""

    def __init__(self, size: int, make_team: Callable[[Shard], GlooTeam]) -> None:
        self._meeting = os.memfd_create("ranks")
        self.teams = [make_team(Shard(rank, size)) for rank in range(size)]
        together([partial(team.join, self._meeting) for team in self.teams])


class ThreadRanks:
    """A `ParallelRunner` over ranks that are threads and share one pool: `runner`."""

    def __init__(
        self,
        size: int,
        make_rank: MakeRank,
        *,
        meet_at_start: bool = False,
        teams: Sequence[Team] | None = None,
    ) -> None:
        """meet_at_start: what they are made of has them wait for each other; teams: if not those of threads."""
        self.meeting = Meeting(size)
        shared: list[HostMemory] = []

        def memory(num_bytes: int) -> HostMemory:
            if not shared:
                shared.append(HostMemory(num_bytes))
            assert shared[0].num_bytes == num_bytes, "all ranks see the same pool"
            return shared[0]

        makers = [
            partial(make_rank, teams[rank] if teams else ThreadTeam(Shard(rank, size), self.meeting), memory)
            for rank in range(size)
        ]
        self.ranks = together(makers) if meet_at_start else [make() for make in makers]
        whole = self.ranks[0].whole_layout
        parts = [Shard(rank, size).kv_part(whole.kv_heads) for rank in range(size)]
        self._threads = RankThreads(self.ranks[1:], parts[1:])
        self.wait, self.close = self._threads.wait, self._threads.close
        self.runner = ParallelRunner(self.ranks[0], whole, parts[0], size, self._threads.tell)


class DeviceRanks:
    """A `ParallelLaunches` over ranks that are threads, with a pool each: `runner`."""

    def __init__(self, size: int, make_rank: Callable[[ThreadTeam], DeviceRunner]) -> None:
        self.meeting = Meeting(size)
        self.ranks = together(
            [partial(make_rank, ThreadTeam(Shard(rank, size), self.meeting)) for rank in range(size)]
        )
        first = self.ranks[0]
        whole = first.whole_layout
        parts = [Shard(rank, size).kv_part(whole.kv_heads) for rank in range(size)]
        self.pool = PartedPool([rank.pool for rank in self.ranks], parts, whole)
        self._threads = RankThreads(self.ranks[1:], [WHOLE] * (size - 1))
        self.close = self._threads.close
        self.runner = ParallelLaunches(first, whole, WHOLE, size, self._threads.tell, self.pool)


def together(makers: Sequence[Callable[[], R]]) -> list[R]:
    """What all of them make, at the same time: they wait for each other."""
    with ThreadPoolExecutor(len(makers)) as threads:
        return [made.result(_LIMIT_S) for made in [threads.submit(make) for make in makers]]


def thread_ranks(
    folder: Path, size: int, teams: Sequence[Team] | None = None, **settings: object
) -> ThreadRanks:
    """Of float32 `TorchRunner`s; settings: as of those."""
    from tests.unit.engine_torch.driving import make_runner

    return ThreadRanks(
        size,
        lambda team, memory: make_runner(folder, team=team, make_memory=memory, **settings),  # type: ignore[arg-type]
        meet_at_start=bool(settings.get("deterministic")),
        teams=teams,
    )
