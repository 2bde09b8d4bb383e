"""The descriptor beside a frame: one is taken, several or none are refused, unasked ones never reach the process."""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.frames import Data, Frame, Memory
from kv_transfer.framing import encode
from kv_transfer.transports.memfd_sharing import MemfdSharing
from kv_transfer.transports.port import Sharing
from kv_transfer.transports.stream_channel import StreamChannel
from pdserve.errors import InvalidRequest
from pdserve.kv_memory import ByteSpan, HostMemory
from pdserve.memfd import MemfdMemory
from tests.support.descriptors import num_pools_open

NUM_BYTES = 8192


class _Watch:
    """Nobody waits."""

    def want_write(self, _channel: StreamChannel, _sock: socket.socket, *, wanted: bool) -> None:
        assert wanted in (True, False)

    def drop(self, _sock: socket.socket) -> None:
        return


class _Taker:
    """A sink that takes the memory when its frame comes."""

    def __init__(self, sharing: Sharing) -> None:
        self._sharing = sharing
        self.error: InvalidRequest | None = None
        self.num_frames = 0

    def place(self, _data: Data, _generation: int, _num_bytes: int) -> ByteSpan | None:
        raise AssertionError

    def on_frame(self, frame: Frame, _generation: int) -> None:
        assert isinstance(frame, Memory)
        self.num_frames += 1
        try:
            self._sharing.take_memory(b"", NUM_BYTES)
        except InvalidRequest as error:
            self.error = error

    def on_done(self, _tag: int) -> None:
        raise AssertionError

    def on_unknown(self, _what: str) -> None:
        raise AssertionError


@pytest.fixture
def ends() -> Iterator[tuple[StreamChannel, socket.socket]]:
    """D's channel, and P's bare socket."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    near.setblocking(False)
    channel = StreamChannel(_Watch(), HostMemory(NUM_BYTES))
    channel.start(near, "stream-unix", "test")
    yield channel, far
    channel.close("the test is over")
    far.close()


def _receive(channel: StreamChannel) -> _Taker:
    assert channel.sharing is not None
    taker = _Taker(channel.sharing)
    channel.is_readable = True
    while channel.receive(taker):
        pass
    return taker


def _descriptor(memory: MemfdMemory) -> int:
    descriptor = memory.export("memfd")
    assert descriptor is not None
    return descriptor


def test_one_descriptor_is_mapped_and_read(ends: tuple[StreamChannel, socket.socket]) -> None:
    channel, far = ends
    pool = MemfdMemory(NUM_BYTES)
    pool.bytes[100:105] = b"hello"
    assert channel.sharing is not None
    channel.sharing.expect_memory()
    wire = encode(Memory(), 1)
    socket.send_fds(far, [wire[:3]], [_descriptor(pool)])
    assert _receive(channel).num_frames == 0 and channel.transport == "stream-unix"
    far.send(wire[3:])
    taker = _receive(channel)
    assert taker.error is None and channel.transport == "memfd"
    assert channel.read_remote(1, [(100, 7, 5)])
    assert bytes(channel._memory.view(ByteSpan(7, 5))) == b"hello"


@given(st.permutations(range(6)), st.permutations(range(6)), st.integers(0, 5))
def test_neighbours_are_read_in_one_and_all_the_same(
    sources: list[int], targets: list[int], num_alike: int
) -> None:
    """Six pieces from anywhere to anywhere; the first few are neighbours in both pools."""
    targets = [*sources[:num_alike], *(each for each in targets if each not in sources[:num_alike])]
    theirs, ours = MemfdMemory(6 * 9), HostMemory(6 * 9)
    theirs.bytes[:] = bytes(range(6 * 9))
    sharing = MemfdSharing(ours, lambda wire, descriptor: None)
    sharing.expect_memory()
    sharing.arrived([(socket.SOL_SOCKET, socket.SCM_RIGHTS, _passed(theirs))])
    sharing.take_memory(b"", theirs.num_bytes)
    sharing.read(1, [(9 * source, 9 * target, 9) for source, target in zip(sources, targets)])
    sharing.close()
    want = bytearray(6 * 9)
    for source, target in zip(sources, targets):
        want[9 * target : 9 * target + 9] = bytes(range(9 * source, 9 * source + 9))
    assert ours.bytes == want


def _passed(memory: MemfdMemory) -> bytes:
    """A copy of its descriptor, as it arrives beside a frame."""
    return array.array("i", [os.dup(_descriptor(memory))]).tobytes()


@pytest.mark.parametrize("num_descriptors", [0, 2, 4, 5, 20])
def test_none_and_several_are_refused_and_closed(
    ends: tuple[StreamChannel, socket.socket], num_descriptors: int
) -> None:
    channel, far = ends
    memory = MemfdMemory(NUM_BYTES)
    assert channel.sharing is not None
    channel.sharing.expect_memory()
    before = num_pools_open()
    socket.send_fds(far, [encode(Memory(), 1)], [_descriptor(memory)] * num_descriptors)
    taker = _receive(channel)
    assert taker.error is not None and "want one descriptor" in str(taker.error)
    assert num_pools_open() == before and not channel.reads_itself


@pytest.mark.parametrize("is_taken", [True, False])
def test_what_comes_unasked_stays_with_the_kernel(
    ends: tuple[StreamChannel, socket.socket], is_taken: bool
) -> None:
    """Before the proof nobody makes this process hold anything; nor after the one descriptor it wanted."""
    channel, far = ends
    memory = MemfdMemory(NUM_BYTES)
    assert channel.sharing is not None
    if is_taken:
        channel.sharing.expect_memory()
        socket.send_fds(far, [encode(Memory(), 1)], [_descriptor(memory)])
        assert _receive(channel).error is None
    before = num_pools_open()
    socket.send_fds(far, [encode(Memory(), 1)], [_descriptor(memory)])
    assert _receive(channel).num_frames == 1
    assert num_pools_open() == before


def test_what_came_for_a_frame_that_never_does_is_closed_with_the_connection(
    ends: tuple[StreamChannel, socket.socket],
) -> None:
    channel, far = ends
    memory = MemfdMemory(NUM_BYTES)
    assert channel.sharing is not None
    before = num_pools_open()
    channel.sharing.expect_memory()
    socket.send_fds(far, [encode(Memory(), 1)[:5]], [_descriptor(memory)])
    assert _receive(channel).num_frames == 0 and num_pools_open() == before + 1
    channel.close("gone")
    assert num_pools_open() == before
    assert far.recv(1) == b"", "its own socket is closed, too"
