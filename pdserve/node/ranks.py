"""The other ranks of a worker whose model is divided: processes of its own, which it starts, leads and ends with.

Rank 0 is the worker's own process. Whichever rank ends before it is told to takes the worker with it (`watch`): what
is left of the model computes nothing.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import msgspec
import structlog

from pdserve.engine.port import Runner
from pdserve.errors import Failure, Incompatible, WorkerLost, from_failure
from pdserve.kv_memory import HostMemory
from pdserve.memfd import MemfdMemory
from pdserve.modelstore.progress import ByteProgress
from pdserve.node.rank_channel import (
    FromRank,
    JoinOrder,
    LoadFailed,
    LoadOrder,
    RankChannel,
    RankJoined,
    RankLoaded,
)
from pdserve.service.config import Config

log = structlog.get_logger()
A = TypeVar("A", RankLoaded, RankJoined)
# All ranks do the same: these are for one that stands still where rank 0 has gone on.
LOADS_S = 600.0
_JOINS_S = 60.0
_ENDS_S = 10.0
_answers: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)


class _Rank:
    def __init__(self, number: int) -> None:
        """Starts its process, which waits for a LoadOrder."""
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "pdserve.node.rank", str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # signals to the group are the worker's: it drains, and needs its ranks
            )
        self.number = number
        self.channel = RankChannel(ours)
        self.pidfd = os.pidfd_open(self.process.pid)

    def answer(self, kind: type[A], limit_s: float) -> A:
        """The next one, which should be of this kind. Raises what it says instead, or WorkerLost."""
        try:
            with self.channel.limited(limit_s):
                told = _answers.decode(self.channel.receive_bytes())
        except (EOFError, OSError) as error:
            raise self.lost() from error
        if isinstance(told, LoadFailed):
            raise from_failure(Failure(told.error, told.message, told.fields))
        assert isinstance(told, kind), told
        return told

    def lost(self) -> WorkerLost:
        """It has closed its end, or stands still; in either case it ends now."""
        try:
            code = self.process.wait(_ENDS_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        return WorkerLost("a rank of the worker has ended", rank=self.number, exit_code=code)


class Ranks:
    """Made and closed on the event loop's thread, which lives as long as the process: the kernel ends ranks with the
    thread that has started them. `load` is called on another one, and what it returns is the engine owner's."""

    def __init__(self, size: int, worker: str = "", loads_s: float = LOADS_S) -> None:
        """size: of the team, this process included; worker: whose ranks they are, for their logs; loads_s: how much
        longer than rank 0 another one may load."""
        self._size = size
        self._loads_s = loads_s
        self._worker = worker
        self._ranks = [_Rank(number) for number in range(1, size)]
        self._watched = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        """End them: a rank that waits for its next step ends by itself, and whatever else one does is over."""
        for rank in self._ranks:
            if self._watched:
                asyncio.get_running_loop().remove_reader(rank.pidfd)
            rank.process.kill()
            rank.process.wait()  # the signal can't be refused
            os.close(rank.pidfd)
            rank.channel.close()

    @property
    def pids(self) -> list[int]:
        return [rank.process.pid for rank in self._ranks]

    def watch(self, on_end: Callable[[str], None]) -> None:
        """Have on_end told, with what is to be said of it, when one ends."""
        self._watched = True
        for rank in self._ranks:
            asyncio.get_running_loop().add_reader(rank.pidfd, self._ended, rank, on_end)

    def _ended(self, rank: _Rank, on_end: Callable[[str], None]) -> None:
        asyncio.get_running_loop().remove_reader(rank.pidfd)
        code = rank.process.wait()
        log.error("rank.ended", rank=rank.number, exit_code=code)
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
        on_end(f"rank {rank.number} ended {how}")

    def load(self, folder: Path, config: Config, progress: ByteProgress) -> Runner:
        """Load a model, each rank its part. Blocks. Raises BadModel, Incompatible, or WorkerLost if a rank ends."""
        from pdserve.engine.parallel.gloo_team import GlooTeam
        from pdserve.engine.parallel.parallel_runner import ParallelRunner
        from pdserve.engine.parallel.shard import Shard
        from pdserve.node.cpu_runner import make_cpu_runner

        for rank in self._ranks:
            order = LoadOrder(rank.number, self._size, str(folder), self._worker, config.engine, config.log)
            self._send(rank, order)
        team, shared = GlooTeam(Shard(0, self._size)), _SharedMemory()
        first = make_cpu_runner(folder, config.engine, make_memory=shared.make, progress=progress, team=team)
        for rank in self._ranks:
            if (theirs := rank.answer(RankLoaded, self._loads_s).pool_bytes) != first.pool.num_bytes:
                raise Incompatible(
                    "the ranks of the worker have read different models", rank=rank.number, pool_bytes=theirs
                )
        meeting = os.memfd_create("pdserve-ranks")  # open as long as the team, as it says
        try:
            for rank in self._ranks:
                self._send(rank, JoinOrder(), (shared.descriptor, meeting))
            team.join(meeting)
        except RuntimeError as error:
            raise WorkerLost("the ranks of the worker don't find each other", reason=error) from error
        for rank in self._ranks:
            rank.answer(RankJoined, _JOINS_S)
        shared.seal()
        part = team.shard.kv_part(first.whole_layout.kv_heads)
        log.info("ranks.joined", size=self._size, pids=self.pids, threads_each=first.num_threads)
        return ParallelRunner(first, first.whole_layout, part, self._size, self._tell)

    def _tell(self, order: bytes) -> None:
        """One step, to all. Raises OSError if one has gone."""
        for rank in self._ranks:
            rank.channel.send_bytes(order)

    def _send(self, rank: _Rank, order: LoadOrder | JoinOrder, descriptors: Sequence[int] = ()) -> None:
        try:
            rank.channel.send(order, descriptors)
        except OSError as error:
            raise rank.lost() from error


class _SharedMemory:
    """The pool's memory, once it is made."""

    def __init__(self) -> None:
        self._memory: MemfdMemory | None = None

    def make(self, num_bytes: int) -> HostMemory:
        """Raises Incompatible if this system can't share memory between processes."""
        try:
            self._memory = MemfdMemory(num_bytes, others_write=True)
        except (OSError, AttributeError) as error:
            raise Incompatible(
                "engine.tensor_parallel needs a KV pool that processes share", reason=str(error)
            ) from error
        return self._memory

    @property
    def descriptor(self) -> int:
        assert self._memory is not None, "made"
        return self._memory.descriptor

    def seal(self) -> None:
        """From now on nobody can map it to write."""
        assert self._memory is not None, "made"
        self._memory.seal_writes()


def verify_for_ranks(config: Config) -> None:
    """Raises Incompatible: settings that a divided model can't keep."""
    engine = config.engine
    if engine.tensor_parallel == 1:
        return
    if engine.kind != "torch":
        raise Incompatible("engine.tensor_parallel divides a model, and the fake engine has none")
    if engine.deterministic:
        raise Incompatible(
            "engine.deterministic can't be kept by several ranks: sums over them depend on who shares a step",
            tensor_parallel=engine.tensor_parallel,
        )
