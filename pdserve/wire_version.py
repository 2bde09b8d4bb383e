"""The version of what processes of a cluster say to each other, apart from the package's: (major, minor).

It stands in the first message of each side: Hello and Welcome of a session, HELLO of a link. Majors must be equal, the
lower minor is spoken; so a cluster is upgraded one process at a time (docs/deploying.md).

    1.0  sessions without a version; a kind of message or frame that isn't known ends the session or link
    1.1  what a later version adds is skipped and counted; HELLO of a link lists the kinds of
         checksums and the transports (MEMORY, MAPPED)
    1.2  a worker's block events are messages of its session (BlockEvents); before, a stream of their own (CacheEvents)

Within a major, fields and kinds may be added and nothing else changes. A new kind is sent only to those whose minor
knows it.
"""

from __future__ import annotations

from pdserve.errors import Incompatible

WireVersion = tuple[int, int]

WIRE_VERSION: WireVersion = (1, 2)
FIRST: WireVersion = (1, 0)
"""Of those that say none."""


def spoken(ours: WireVersion, theirs: WireVersion | None) -> WireVersion:
    """What a router and a worker speak. Raises Incompatible, which names both, if their majors differ."""
    theirs = theirs or FIRST
    if ours[0] != theirs[0]:
        raise Incompatible(
            "the other side speaks another major version", field="wire", ours=text(ours), theirs=text(theirs)
        )
    return ours[0], min(ours[1], theirs[1])


def announced(minor: int) -> WireVersion:
    """By a process that was told (cluster.wire_minor) to be of this minor."""
    return WIRE_VERSION[0], minor


def text(wire: WireVersion) -> str:
    """As logs and errors show it."""
    return f"{wire[0]}.{wire[1]}"
