"""What goes between a process, its fork server and its children: msgpack, one message a packet or a frame.

A child may have been taken over by what it runs, so nothing of it is unpickled, and its frames are bounded.
"""

from __future__ import annotations

import msgspec

MOST_FRAME_BYTES = 64 << 20  # of an answer; the largest is a rendered chat
LENGTH_BYTES = 4


class ProveStructure(msgspec.Struct, frozen=True, tag=True):
    """Compile a structure, and follow it a little; kind and texts are its own."""

    kind: str
    texts: tuple[str, ...]


class RenderChat(msgspec.Struct, frozen=True, tag=True):
    """Write a conversation by a template.

    special_tokens  that the template may read, by name
    chat            JSON: what `ChatTemplate.render` takes, by the names of its parameters
    """

    template: str
    special_tokens: dict[str, str]
    chat: str


Job = ProveStructure | RenderChat


class Proven(msgspec.Struct, frozen=True, tag=True):
    """It compiles. cpu_s and num_bytes: what that took."""

    cpu_s: float
    num_bytes: int


class Rendered(msgspec.Struct, frozen=True, tag=True):
    """The text of a conversation."""

    text: str


class JobRefused(msgspec.Struct, frozen=True, tag=True):
    """The job's own error, as a `Failure`."""

    error: str
    message: str
    fields: dict[str, str]


class OutOfMemory(msgspec.Struct, frozen=True, tag=True):
    """The limit was met where the interpreter could still say so."""


class Crashed(msgspec.Struct, frozen=True, tag=True):
    """An exception that nobody expects."""

    words: str


Done = Proven | Rendered
Outcome = Done | JobRefused | OutOfMemory | Crashed


class JobOrder(msgspec.Struct, frozen=True):
    """To a child. cpu_s: what the job may compute, at most; the kernel ends what takes twice as much."""

    job: Job
    cpu_s: float


class JobAnswer(msgspec.Struct, frozen=True):
    """Of a child. grown_bytes: what it holds more than when it began, after all its jobs."""

    outcome: Outcome
    grown_bytes: int


class Fork(msgspec.Struct, frozen=True, tag=True):
    """To the fork server, with the child's end of a socket. number: the child's name in what follows."""

    number: int
    memory_bytes: int
    niceness: int


class Kill(msgspec.Struct, frozen=True, tag=True):
    """To the fork server: SIGKILL, unless the child has ended."""

    number: int


class ServerReady(msgspec.Struct, frozen=True, tag=True):
    """Of the fork server: what children need is imported."""


class Forked(msgspec.Struct, frozen=True, tag=True):
    """Of the fork server."""

    number: int
    pid: int


class Exited(msgspec.Struct, frozen=True, tag=True):
    """Of the fork server: a child has ended, and is no zombie.

    signal  that ended it; 0 = it left by itself
    words   the last that it wrote to its standard error
    """

    number: int
    signal: int
    words: str


ToServer = Fork | Kill
FromServer = ServerReady | Forked | Exited

MOST_PACKET_BYTES = 4096  # between a process and its fork server


def frame(message: msgspec.Struct) -> bytes:
    """A message with its length in front."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body
