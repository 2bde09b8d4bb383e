"""A closed end of a session delivers what it had queued to another side that is slow, and gives up one that is dead."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from pdserve.service.grpc_stream import LINGER_S, MOST_LINGER_S, GrpcStream
from pdserve.service.rpc import EOF
from tests.support.virtual_loop import run_virtual

NUM_QUEUED = 5
BEAT_S = 0.5 * LINGER_S


@dataclass
class Other:
    """The other side.

    write_s  how long it takes to take in a message; None: for ever
    reads_s  how long it then goes on reading, until it ends the call; None: it never does
    beats    whether it says meanwhile that it lives
    """

    write_s: float | None
    reads_s: float | None
    beats: bool = True
    taken: list[int] = field(default_factory=list)
    half_closed: asyncio.Event = field(default_factory=asyncio.Event)
    saw_the_end: bool = False
    closes_at_s: float | None = None

    async def write(self, message: int) -> None:
        if self.write_s is None:
            await asyncio.Event().wait()
        else:
            await asyncio.sleep(self.write_s)
        self.taken.append(message)

    async def half_close(self) -> None:
        self.half_closed.set()
        self.closes_at_s = None if self.reads_s is None else asyncio.get_running_loop().time() + self.reads_s

    async def read(self) -> object:
        loop = asyncio.get_running_loop()
        if not self.beats:
            await self.half_closed.wait()
        if self.half_closed.is_set() and self.closes_at_s is not None:
            left_s = self.closes_at_s - loop.time()
            if not self.beats or left_s <= BEAT_S:
                await asyncio.sleep(max(0.0, left_s))
                self.saw_the_end = True
                return EOF
        await asyncio.sleep(BEAT_S if self.beats else 10 * MOST_LINGER_S)
        return 0


def took_s(other: Other) -> float:
    """How long a session takes to end that is closed with something queued."""

    async def scenario() -> float:
        stream: GrpcStream[int, int] = GrpcStream("other", lambda message: message, lambda message: message)
        for message in range(NUM_QUEUED):
            stream.send(message)
        stream.close("done")
        begun_s = asyncio.get_running_loop().time()
        await stream.run(other.read, other.write, other.half_close)
        return asyncio.get_running_loop().time() - begun_s

    return run_virtual(scenario())


@pytest.mark.parametrize("write_s", [0.0, 0.9 * LINGER_S])
@pytest.mark.parametrize("reads_s", [0.0, 5 * LINGER_S])
def test_one_that_is_slow_gets_everything(write_s: float, reads_s: float) -> None:
    other = Other(write_s, reads_s)
    took_s(other)
    assert other.taken == list(range(NUM_QUEUED))
    assert other.saw_the_end


def test_one_that_takes_nothing_and_says_nothing_is_given_up() -> None:
    other = Other(write_s=None, reads_s=None, beats=False)
    assert took_s(other) <= 2 * LINGER_S
    assert other.taken == []


def test_one_that_never_ends_the_call_is_given_up_although_it_lives() -> None:
    other = Other(write_s=0.0, reads_s=None)
    assert took_s(other) == pytest.approx(MOST_LINGER_S)
    assert other.taken == list(range(NUM_QUEUED))
