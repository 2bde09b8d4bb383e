"""A rank of a worker that isn't the first: loads its part of the model, then computes the steps that it is told of.

    python -m pdserve.node.rank CHANNEL_FD PARENT_PID      started by `ranks.py`, not by people

It ends with its worker, and the worker with it: an error is logged here, and the end of the process says the rest.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import msgspec
import structlog

from pdserve.children.process_limits import die_with_parent
from pdserve.engine.parallel.gloo_team import GlooTeam
from pdserve.engine.parallel.parallel_runner import follow_step
from pdserve.engine.parallel.shard import Shard
from pdserve.errors import Failure, Incompatible, PdserveError, to_failure
from pdserve.kv_memory import HostMemory
from pdserve.memfd import RankMemory
from pdserve.node.cpu_runner import make_cpu_runner
from pdserve.node.rank_channel import (
    JoinOrder,
    LoadFailed,
    LoadOrder,
    RankChannel,
    RankJoined,
    RankLoaded,
    ToRank,
)
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
    team = GlooTeam(shard)
    meetings: list[int] = []

    def join(num_bytes: int) -> HostMemory:
        """Called when the weights are loaded."""
        channel.send(RankLoaded(num_bytes))
        told = _orders.decode(channel.receive_bytes())
        assert isinstance(told, JoinOrder), "the second one"
        pool, meeting = channel.taken_descriptors()
        meetings.append(meeting)
        return RankMemory(pool, num_bytes)

    try:
        runner = make_cpu_runner(Path(order.folder), order.engine, make_memory=join, team=team)
    except PdserveError as error:
        channel.send(_failed(error))
        return EXIT_FAILED
    team.join(meetings[0])
    channel.send(RankJoined())
    part = shard.kv_part(runner.whole_layout.kv_heads)
    log.debug("rank.joined")
    while True:
        follow_step(runner, part, channel.receive_bytes())


def _failed(error: PdserveError) -> LoadFailed:
    failure: Failure = to_failure(error)
    # Whatever can't be loaded is an Incompatible to whoever doesn't know model folders.
    name = Incompatible.__name__ if isinstance(error, Incompatible) else failure.error
    return LoadFailed(name, failure.message, dict(failure.fields))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
