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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

import msgspec
import structlog

from pdserve.engine.port import Runner
from pdserve.errors import Failure, Incompatible, WorkerLost, from_failure
from pdserve.kv_memory import HostMemory
from pdserve.memfd import MemfdMemory
from pdserve.modelstore.progress import ByteProgress
from pdserve.node.rank_channel import (
    PULSE_S,
    FromRank,
    JoinOrder,
    LoadFailed,
    LoadOrder,
    RankChannel,
    RankJoined,
    RankLoaded,
)
from pdserve.service.config import Config

if TYPE_CHECKING:  # torch, which a worker with the fake engine never imports
    from pdserve.engine.device.devices import Device
    from pdserve.engine.parallel.gloo_team import GlooTeam

log = structlog.get_logger()
A = TypeVar("A", RankLoaded, RankJoined)
# All ranks do the same: these are for one that stands still where rank 0 has gone on.
LOADS_S = 600.0
_JOINS_S = 60.0
_ENDS_S = 10.0
_MOST_SILENT = 8  # ticks: a rank that is merely slow is heard of sooner
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
        self.num_silent = 0  # ticks without a pulse

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
        self._tick: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        """End them: a rank that waits for its next step ends by itself, and whatever else one does is over."""
        if self._tick is not None:
            self._tick.cancel()
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
        """Have on_end told, with what is to be said of it, when one ends, or stands still.

        Time is counted in ticks of the loop: if this process stood still itself, pulses wait for it to hear them.
        """
        self._watched = True
        for rank in self._ranks:
            asyncio.get_running_loop().add_reader(rank.pidfd, self._ended, rank, on_end)
        self._listen(on_end)

    def _listen(self, on_end: Callable[[str], None]) -> None:
        for rank in self._ranks:
            rank.num_silent = 0 if rank.channel.was_heard() else rank.num_silent + 1
            if rank.num_silent == _MOST_SILENT:
                log.error("rank.stands_still", rank=rank.number, silent_s=rank.num_silent * PULSE_S)
                on_end(f"rank {rank.number} stands still")
        self._tick = asyncio.get_running_loop().call_later(PULSE_S, self._listen, on_end)

    def _ended(self, rank: _Rank, on_end: Callable[[str], None]) -> None:
        asyncio.get_running_loop().remove_reader(rank.pidfd)
        code = rank.process.wait()
        log.error("rank.ended", rank=rank.number, exit_code=code)
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
        on_end(f"rank {rank.number} ended {how}")

    def load(self, folder: Path, config: Config, progress: ByteProgress) -> Runner:
        """Load a model on the CPU, each rank its part. Blocks.

        Raises BadModel, Incompatible, or WorkerLost if a rank ends.
        """
        from pdserve.engine.parallel.parallel_runner import ParallelRunner
        from pdserve.engine.parallel.shard import Shard
        from pdserve.node.cpu_runner import make_cpu_runner
        from pdserve.node.rank_team import make_team

        self._order_loads(folder, config)
        team, shared = make_team(Shard(0, self._size), None, config.engine), _SharedMemory()

        def make_memory(num_bytes: int) -> HostMemory:
            memory = shared.make(num_bytes)
            self._join(team, num_bytes, (shared.descriptor,))
            return memory

        with self._answering():
            first = make_cpu_runner(
                folder, config.engine, make_memory=make_memory, progress=progress, team=team
            )
        for rank in self._ranks:
            rank.answer(RankJoined, _JOINS_S)
        shared.seal()
        whole = first.whole_layout
        log.info("ranks.joined", size=self._size, pids=self.pids, threads_each=first.num_threads)
        part = team.shard.kv_part(whole.kv_heads)
        return ParallelRunner(first, whole, part, self._size, self._tell)

    def load_on(self, device: Device, folder: Path, config: Config, progress: ByteProgress) -> Runner:
        """Load a model, rank 0 its part on this device, each other one on one of its own. As `load`."""
        from pdserve.engine.parallel.parallel_runner import ParallelLaunches
        from pdserve.engine.parallel.parted_pool import PartedPool
        from pdserve.engine.parallel.shard import WHOLE, Shard
        from pdserve.node.device_runner import make_device_runner
        from pdserve.node.rank_pools import mapped
        from pdserve.node.rank_team import make_team

        self._order_loads(folder, config)
        team = make_team(Shard(0, self._size), device, config.engine)

        def on_loaded(block_bytes: int) -> None:
            self._join(team, block_bytes)

        with self._answering():
            first = make_device_runner(
                folder, config.engine, device, progress=progress, team=team, on_loaded=on_loaded
            )
        pools, gpus = [first.pool], list(device.gpus)
        for rank in self._ranks:
            joined = rank.answer(RankJoined, _JOINS_S)
            assert joined.pool is not None, "it has one of its own"
            pools.append(mapped(joined.pool, rank.channel.taken_descriptors()))
            gpus += joined.gpus
        whole = first.whole_layout
        parts = [Shard(number, self._size).kv_part(whole.kv_heads) for number in range(self._size)]
        pool = PartedPool(pools, parts, whole)
        log.info("ranks.joined", size=self._size, pids=self.pids, gpus=gpus)
        return ParallelLaunches(first, whole, WHOLE, self._size, self._tell, pool, tuple(gpus))

    def _order_loads(self, folder: Path, config: Config) -> None:
        for rank in self._ranks:
            order = LoadOrder(rank.number, self._size, str(folder), self._worker, config.engine, config.log)
            self._send(rank, order)

    def _join(self, team: GlooTeam, kv_bytes: int, descriptors: Sequence[int] = ()) -> None:
        """All have loaded: become a team. kv_bytes: see `RankLoaded`."""
        for rank in self._ranks:
            if (theirs := rank.answer(RankLoaded, self._loads_s).kv_bytes) != kv_bytes:
                raise Incompatible(
                    "the ranks of the worker have read different models", rank=rank.number, kv_bytes=theirs
                )
        meeting = os.memfd_create("pdserve-ranks")  # open as long as the team, as it says
        for rank in self._ranks:
            self._send(rank, JoinOrder(), (meeting, *descriptors))
        team.join(meeting)

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """While rank 0 loads: the team's error is that of the rank that ends, if one does."""
        try:
            yield
        except RuntimeError as error:
            for rank in self._ranks:
                if rank.channel.has_something(_ENDS_S):
                    rank.answer(RankJoined, _ENDS_S)
            raise WorkerLost("the ranks of the worker don't find each other", reason=error) from error

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
