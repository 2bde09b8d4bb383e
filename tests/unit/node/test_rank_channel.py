"""What a worker and its ranks say goes through whole, with files, and within a limit."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from pdserve.node.rank_channel import RankChannel


@pytest.fixture
def ends() -> Iterator[tuple[RankChannel, RankChannel, socket.socket]]:
    """Both ends, and the first one's socket."""
    ours, theirs = socket.socketpair()
    first, second = RankChannel(ours), RankChannel(theirs)
    yield first, second, ours
    first.close()
    second.close()


def test_messages_come_whole_however_they_are_cut(
    ends: tuple[RankChannel, RankChannel, socket.socket],
) -> None:
    _, second, ours = ends
    data = bytes(range(256)) * 5000  # more than a socket holds

    def write() -> None:
        for piece in (b"\x00", b"\x13", (len(data) & 0xFFFF).to_bytes(2, "big"), data[:7], data[7:]):
            ours.sendall(piece)

    assert len(data).to_bytes(4, "big")[:2] == b"\x00\x13"
    writing = threading.Thread(target=write)
    writing.start()
    assert second.receive_bytes() == data
    writing.join()


def test_files_come_with_their_message(ends: tuple[RankChannel, RankChannel, socket.socket]) -> None:
    first, second, _ = ends
    given = [os.memfd_create("a"), os.memfd_create("b")]
    os.write(given[1], b"second")
    first.send_bytes(b"with files", given)
    first.send_bytes(b"without")
    assert second.receive_bytes() == b"with files"
    taken = second.taken_descriptors()
    assert os.pread(taken[1], 10, 0) == b"second" and second.taken_descriptors() == []
    assert second.receive_bytes() == b"without"
    for descriptor in given + taken:
        os.close(descriptor)


def test_nothing_comes_from_who_is_silent_or_gone(
    ends: tuple[RankChannel, RankChannel, socket.socket],
) -> None:
    first, second, _ = ends
    with pytest.raises(TimeoutError), second.limited(0.01):
        second.receive_bytes()
    first.send_bytes(b"still there")
    assert second.receive_bytes() == b"still there"
    first.close()
    with pytest.raises(EOFError):
        second.receive_bytes()
