"""A rank of a worker that isn't the first: loads its part of the model, then computes the steps that it is told of.

    python -m pdserve.node.rank CHANNEL_FD PARENT_PID      started by `ranks.py`, not by people

It ends with its worker, and the worker with it: an error is logged here, and the end of the process says the rest.
"""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import structlog

from pdserve.children.process_limits import die_with_parent
from pdserve.engine.parallel.parallel_runner import Following
from pdserve.engine.parallel.shard import WHOLE, Shard
from pdserve.errors import Failure, Incompatible, PdserveError, to_failure
from pdserve.kv_memory import HostMemory
from pdserve.memfd import RankMemory
from pdserve.node.cpu_runner import make_cpu_runner
from pdserve.node.device_runner import find_device, make_device_runner
from pdserve.node.rank_channel import (
    PULSE_S,
    JoinOrder,
    LoadFailed,
    LoadOrder,
    RankChannel,
    RankJoined,
    RankLoaded,
    ToRank,
)
from pdserve.node.rank_pools import exported
from pdserve.node.rank_team import make_team
from pdserve.service.lifecycle import EXIT_FAILED, EXIT_OK
from pdserve.service.logs import set_up_logs

log = structlog.get_logger()
_orders: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)


def main(channel_fd: int, parent_pid: int) -> int:
    """Returns the exit code, when the worker has closed its end."""
    die_with_parent(parent_pid)
    channel = RankChannel(socket.socket(fileno=channel_fd))
    try:
        return _serve(channel)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return EXIT_OK
    except Exception:  # the process's outermost frame
        log.exception("rank.died")
        return EXIT_FAILED


def _serve(channel: RankChannel) -> int:
    order = _orders.decode(channel.receive_bytes())
    assert isinstance(order, LoadOrder), "the first one"
    shard = Shard(order.rank, order.size)
    set_up_logs(order.log, worker=order.worker, rank=order.rank)
    try:
        following, joined, descriptors = _load(channel, order, shard)
    except PdserveError as error:
        channel.send(_failed(error))
        return EXIT_FAILED
    channel.send(joined, descriptors)
    threading.Thread(target=_pulse, args=(channel,), name="pulse", daemon=True).start()
    log.debug("rank.joined")
    while True:
        following.step(channel.receive_bytes())


def _pulse(channel: RankChannel) -> None:
    never = threading.Event()
    with suppress(OSError):  # the worker has ended, which the other thread hears of
        while not never.wait(PULSE_S):
            channel.pulse()


def _load(
    channel: RankChannel, order: LoadOrder, shard: Shard
) -> tuple[Following, RankJoined, Sequence[int]]:
    """Returns what it is to the others, and descriptors that go with that."""
    folder = Path(order.folder)
    device = find_device(order.engine.device, order.rank)
    team = make_team(shard, device, order.engine)

    def join(kv_bytes: int) -> list[int]:
        """Called when the weights are loaded. Returns the descriptors that came with the order."""
        channel.send(RankLoaded(kv_bytes))
        told = _orders.decode(channel.receive_bytes())
        assert isinstance(told, JoinOrder), "the second one"
        meeting, *others = channel.taken_descriptors()
        team.join(meeting)
        return others

    def join_alone(block_bytes: int) -> None:
        join(block_bytes)

    if device is not None:
        on_device = make_device_runner(folder, order.engine, device, team=team, on_loaded=join_alone)
        pool, descriptors = exported(on_device.pool)
        return Following(on_device, WHOLE), RankJoined(pool, device.gpus), descriptors

    def map_pool(num_bytes: int) -> HostMemory:
        (pool,) = join(num_bytes)
        return RankMemory(pool, num_bytes)

    runner = make_cpu_runner(folder, order.engine, make_memory=map_pool, team=team)
    return Following(runner, shard.kv_part(runner.whole_layout.kv_heads)), RankJoined(), ()


def _failed(error: PdserveError) -> LoadFailed:
    failure: Failure = to_failure(error)
    # Whatever can't be loaded is an Incompatible to whoever doesn't know model folders.
    name = Incompatible.__name__ if isinstance(error, Incompatible) else failure.error
    return LoadFailed(name, failure.message, dict(failure.fields))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
