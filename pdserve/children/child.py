"""A child: takes jobs from its socket, one after another, until the socket ends or a limit is passed."""

from __future__ import annotations

import socket

import msgspec

from pdserve.children.frames import (
    LENGTH_BYTES,
    Crashed,
    Job,
    JobAnswer,
    JobOrder,
    JobRefused,
    Outcome,
    OutOfMemory,
    ProveStructure,
    RenderChat,
    frame,
)
from pdserve.children.process_limits import limit_cpu, private_bytes
from pdserve.children.prove import prove_structure
from pdserve.children.render import render_chat
from pdserve.errors import PdserveError, to_failure

_orders = msgspec.msgpack.Decoder(JobOrder)


def work(channel: socket.socket) -> None:
    """Returns when the parent has closed its end."""
    begun_bytes = private_bytes()
    with channel.makefile("rb") as incoming:
        while len(length := incoming.read(LENGTH_BYTES)) == LENGTH_BYTES:
            order = _orders.decode(incoming.read(int.from_bytes(length, "big")))
            limit_cpu(2 * order.cpu_s)
            outcome = _do(order.job)
            channel.sendall(frame(JobAnswer(outcome, max(0, private_bytes() - begun_bytes))))


def _do(job: Job) -> Outcome:
    try:
        match job:
            case ProveStructure():
                return prove_structure(job)
            case RenderChat():
                return render_chat(job)
    except MemoryError:
        return OutOfMemory()
    except PdserveError as error:
        failure = to_failure(error)
        return JobRefused(failure.error, failure.message, dict(failure.fields))
    except Exception as bug:  # the outermost frame of a job: the next one may be sound
        return Crashed(f"{type(bug).__name__}: {bug}"[:300])
