"""A TLS connection as a channel uses it: what is unsent can be copied away, what arrives can be diverted."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator

import pytest

from kv_transfer.frames import Data, Frame
from kv_transfer.framing import encode
from kv_transfer.transports.stream_channel import StreamChannel
from kv_transfer.transports.stream_tls import STREAM_TLS, LinkTls, TlsSocket
from pdserve.kv_memory import ByteSpan, HostMemory
from tests.support.certificates import link_certificates

NUM_BYTES = 4 << 20


class _Watch:
    """Nobody waits."""

    def want_write(self, _channel: StreamChannel, _sock: socket.socket, *, wanted: bool) -> None:
        assert wanted in (True, False)

    def drop(self, _sock: socket.socket) -> None:
        return


class _Sink:
    """Takes pieces to the start of the pool."""

    def __init__(self) -> None:
        self.tags: list[int] = []
        self.placed: list[int] = []

    def place(self, data: Data, _generation: int, num_bytes: int) -> ByteSpan | None:
        self.placed.append(data.tag)
        return ByteSpan(0, num_bytes)

    def on_frame(self, frame: Frame, _generation: int) -> None:
        assert isinstance(frame, Data)
        self.tags.append(frame.tag)

    def on_done(self, _tag: int) -> None:
        raise AssertionError

    def on_unknown(self, _what: str) -> None:
        raise AssertionError


@pytest.fixture
def ends() -> Iterator[tuple[StreamChannel, StreamChannel]]:
    """Two channels over one TLS connection on loopback, their pools full of different bytes."""
    tls = LinkTls(link_certificates())
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    socks = []
    for sock in (near, far):
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    secured: tuple[TlsSocket, TlsSocket] = (tls.dialled(near, "127.0.0.1"), tls.accepted(far))
    waiting = list(secured)
    while waiting:
        waiting = [sock for sock in waiting if sock.shakes_hands()]
    for seed, sock in enumerate(secured):
        memory = HostMemory(NUM_BYTES)
        memory.bytes[:] = random.Random(seed).randbytes(NUM_BYTES)
        channel = StreamChannel(_Watch(), memory)
        channel.start(sock, STREAM_TLS, "tls://there")
        socks.append(channel)
    yield socks[0], socks[1]
    for channel in socks:
        channel.close("the test is over")


def _send_half(sender: StreamChannel) -> bytes:
    """A piece of the whole pool, as far as it goes while the other side doesn't read. returns what the pool had."""
    before = bytes(sender._memory.view(ByteSpan(0, NUM_BYTES)))
    sender.send_piece(encode(Data(1, 7, 0), 1, NUM_BYTES), ByteSpan(0, NUM_BYTES))
    sender.flush()
    assert sender.num_unsent_pieces == 1 and not sender.is_writable
    return before


def _pass_all(sender: StreamChannel, receiver: StreamChannel, sink: _Sink) -> None:
    while not sink.tags:
        sender.is_writable = receiver.is_readable = True
        sender.flush()
        receiver.receive(sink)
        assert receiver.closed_reason is None and sender.closed_reason is None


def test_what_is_unsent_is_copied_away(ends: tuple[StreamChannel, StreamChannel]) -> None:
    """Also the record that is encrypted, and must be written again from where the copy lies."""
    sender, receiver = ends
    assert sender.can_detach and not sender.is_posted and not sender.reads_itself and sender.sharing is None
    before = _send_half(sender)
    sender.detach_piece()
    assert sender.num_unsent_pieces == 0
    sender._memory.view(ByteSpan(0, NUM_BYTES))[:] = bytes(NUM_BYTES)
    _pass_all(sender, receiver, _Sink())
    assert receiver._memory.view(ByteSpan(0, NUM_BYTES)) == before


def test_what_arrives_is_diverted(ends: tuple[StreamChannel, StreamChannel]) -> None:
    sender, receiver = ends
    _send_half(sender)
    sink = _Sink()
    while not sink.placed:
        receiver.is_readable = True
        receiver.receive(sink)
    assert receiver.divert(7)
    now = bytes(receiver._memory.view(ByteSpan(0, NUM_BYTES)))
    _pass_all(sender, receiver, sink)
    assert receiver._memory.view(ByteSpan(0, NUM_BYTES)) == now


def test_the_other_end_is_found_out(ends: tuple[StreamChannel, StreamChannel]) -> None:
    sender, receiver = ends
    sender.close("enough")
    while receiver.closed_reason is None:
        receiver.is_readable = True
        receiver.receive(_Sink())
    assert receiver.closed_reason == "the peer closed"


def test_bytes_that_are_no_record_end_the_connection(ends: tuple[StreamChannel, StreamChannel]) -> None:
    sender, receiver = ends
    assert sender._sock is not None
    socket.socket.send(sender._sock, b"garbage in between")
    while receiver.closed_reason is None:
        receiver.is_readable = True
        receiver.receive(_Sink())
    assert receiver.closed_reason == "read failed: it doesn't speak TLS"
