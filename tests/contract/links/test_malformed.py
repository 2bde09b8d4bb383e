"""What no sound peer sends ends the link cleanly, and names the field."""

from __future__ import annotations

import socket
import struct

import msgpack
import msgspec
import pytest
from structlog.testing import capture_logs

from kv_transfer import messages
from kv_transfer.frames import Ack, Bye, Commit, Data, Frame, Kind, Ping, Pull, PulledPiece, Ready
from kv_transfer.framing import (
    HEADER_BYTES,
    MAX_BODY_BYTES,
    encode,
    enveloped,
    parse_body,
    parse_header,
    unknown_in,
)
from pdserve.kv_memory import ByteSpan
from pdserve.sampling import TokenLogprobs
from tests.contract.links.conftest import MakeWorld
from tests.contract.links.world import World, assert_handed_off, innermost

HEADER = struct.Struct("<2sBBIIII")


def _raw_frame(
    *, magic: bytes = b"KV", flags: int = 0, kind: int = 4, body: int = 0, payload: int = 0
) -> bytes:
    return HEADER.pack(magic, flags, kind, 1, body, payload, 0)


MALFORMED = [
    ("magic", _raw_frame(magic=b"GE")),
    ("flags", _raw_frame(flags=1)),
    ("kind", _raw_frame(kind=0)),
    ("body_bytes", _raw_frame(body=MAX_BODY_BYTES + 1)),
    ("payload_bytes", _raw_frame(payload=1)),
    ("payload_bytes", _raw_frame(kind=Kind.DATA, payload=(4 << 20) + 1)),
    ("payload_bytes", _raw_frame(kind=Kind.DATA, payload=0)),
    ("sum", _raw_frame() + b"\x80"),
    ("kind", encode(Ack(1), 1)),
    ("kind", encode(Data(1, 1, 1), 1, payload_bytes=3) + b"abc"),
]


@pytest.mark.parametrize("transport", ["stream-unix", "stream-tcp"])
@pytest.mark.parametrize(("field", "sent"), MALFORMED)
def test_a_malformed_frame_of_a_stranger_is_told_to_the_log_only(
    transport: str, field: str, sent: bytes
) -> None:
    world = World(transport)
    decode = world.node("d")
    address = decode.owner.addresses[0]
    with _connect(address) as stranger:
        stranger.sendall(sent)
        with capture_logs() as logs:
            world.run(lambda: bool(decode.owner.metrics.malformed))
        assert decode.owner.metrics.malformed == {"unknown": 1}
        frames = _frames(stranger, is_unix=address.startswith("unix://"))
        assert isinstance(frames[-1], Bye)
        assert (frames[-1].message, frames[-1].fields) == ("not known here", {})
        assert f"field={field}" in next(line for line in logs if line["event"] == "link.down")["reason"]
    assert not decode.owner._links
    world.close()


@pytest.mark.parametrize("transport", ["stream-unix", "stream-tcp"])
def test_a_stranger_who_says_nothing_is_sent_away_after_link_s(transport: str) -> None:
    world = World(transport)
    decode = world.node("d")
    with _connect(decode.owner.addresses[0]) as stranger:
        stranger.sendall(encode(Ping(), 0))
        world.run(lambda: bool(decode.owner._links))
        began_s = world.clock.now_s()
        world.run(lambda: not decode.owner._links, for_s=6.0)
        assert world.clock.now_s() - began_s <= 4.5
    world.close()


def test_strangers_are_bounded_and_make_room_for_later_ones() -> None:
    """Of each kind of socket by itself, and without keeping out a worker that knows the secret."""
    world = World("stream-unix")
    prefill, decode = (world.node(name, secret=b"s" * 32) for name in "pd")
    tcp_only = world.node("p2", secret=b"s" * 32, prefer_unix=False)
    strangers: list[socket.socket] = []
    for address in decode.owner.addresses:
        for _ in range(80):
            strangers.append(_connect(address))
            world.sleep(0.001)
    assert len(decode.owner._links) == 2 * 64
    assert decode.owner.metrics.pushed_out == 2 * 16
    with capture_logs() as logs:
        world.pair(prefill, decode)
        world.pair(tcp_only, decode)
    ups = [line["transport"] for line in logs if line["event"] == "link.up" and line["side"] == "decode"]
    assert ups == ["stream-unix", "stream-tcp"]
    assert _frames(strangers[0], is_unix=True) == [Bye("WorkerLost", "not known here", {})]  # the oldest
    for stranger in strangers:
        stranger.close()
    world.close()


FORGED_BY_PREFILL: list[tuple[str, Frame]] = [
    ("kind", Ack(1)),
    ("kind", Pull(1, (PulledPiece(1, 0, 0, 1),))),
]


@pytest.mark.parametrize("transport", ["stream-unix", "memory"])
@pytest.mark.parametrize(("field", "frame"), FORGED_BY_PREFILL)
def test_a_peer_that_sends_the_others_frames_loses_its_link(transport: str, field: str, frame: Frame) -> None:
    world = World(transport)
    prefill, decode = world.node("p"), world.node("d")
    world.pair(prefill, decode)
    prefill.owner._links[0].send(frame)
    world.run(lambda: bool(decode.owner.metrics.malformed))
    assert decode.owner.metrics.malformed == {"p": 1}
    world.close()


@pytest.mark.parametrize(
    ("block", "offset", "num_bytes"),
    [(0, 0, 16), (3, 0, 16), (1, 12_288, 16), (1, 12_280, 16), (1, 0, 12_289)],
)
def test_a_pull_outside_of_the_offer_ends_that_lease(block: int, offset: int, num_bytes: int) -> None:
    """Blocks 1 and 2 are offered, of 12,288 bytes each."""
    world = World("memory")
    prefill, decode = world.node("p"), world.node("d")
    world.pair(prefill, decode)
    prefill.owner.handle(messages.OpenLease(1, decode.ref, 4, 1))
    world.offer(prefill, 1, upto=3, num_new=2)
    world.settle()
    decode.owner._links[0].send(Pull(1, (PulledPiece(1, block, offset, num_bytes),)))
    world.wait_ends(1, prefill)
    world.grant(prefill, decode, 1, num_blocks=4, num_skip=1)
    world.wait_ends(1, decode)
    assert prefill.owner.metrics.sent_bytes == 0
    world.close()


@pytest.mark.parametrize("transport", ["stream-unix", "memory"])
def test_frames_of_another_generation_are_stale(transport: str) -> None:
    world = World(transport)
    prefill, decode = world.node("p"), world.node("d")
    world.pair(prefill, decode)
    world.open(prefill, decode, 1, num_blocks=2)
    world.settle()
    [link] = prefill.owner._links
    link._channel.send(encode(Ready(1, 2), link.generation + 1))
    link._channel.send_piece(encode(Data(1, 1, 1), link.generation + 1, 5), ByteSpan(0, 5))
    world.run(lambda: decode.owner.metrics.stale == {("p", "READY"): 1, ("p", "DATA"): 1})
    assert not decode.ends(1) and not decode.is_pulling(1)
    world.close()


@pytest.mark.parametrize("side", ["p", "d"])
def test_what_a_later_version_adds_is_skipped_and_counted(make_world: MakeWorld, side: str) -> None:
    """What version N − 1 must do for N to be able to add a field or a kind, either way: the hand-off goes on."""
    world = make_world()
    prefill, decode = world.node("p"), world.node("d")
    world.pair(prefill, decode)
    sender, hearer = (prefill, decode) if side == "p" else (decode, prefill)
    [link] = sender.owner._links
    connection = innermost(link._channel)  # what it is wrapped in knows the kinds of this version only
    ping = msgpack.packb({"added_later": {"x": [1, None]}})
    connection.send(enveloped(Kind.PING, ping, link.generation))
    connection.send(enveloped(200, msgpack.packb({"lease": 1}), link.generation))
    world.run(lambda: hearer.owner.metrics.unknown == {"field": 1, "kind": 1})
    if side == "p":
        world.open(prefill, decode, 1, num_blocks=2)
        world.settle()
        more = {"lease": 1, "upto": 0, "block_ids": [], "added_later": 1}
        connection.send(enveloped(Kind.READY, msgpack.packb(more), link.generation))
        world.run(lambda: hearer.owner.metrics.unknown == {"field": 2, "kind": 1})
    sent = world.hand_off(prefill, decode, 2, num_blocks=2)
    world.wait_ends(2, prefill, decode)
    assert_handed_off(prefill, decode, 2, sent)
    assert not hearer.owner.metrics.malformed and sender.owner.metrics.unknown == {}


@pytest.mark.parametrize(
    "frame",
    [
        Ready(1, 2),
        Commit.of(1, 2, 3, None),
        Commit.of(1, 2, 3, TokenLogprobs(-1.0, ((3, -1.0),))),
        Ping(),
    ],
)
def test_what_is_unknown_of_a_frame(frame: Frame) -> None:
    body = msgspec.msgpack.encode(frame)
    assert unknown_in(frame, body) == ""
    more = msgpack.packb({**msgpack.unpackb(body), "later": 1})
    wide = b"\xde" + len(msgpack.unpackb(more)).to_bytes(2, "big") + more[1:]  # the same map with a long head
    assert unknown_in(frame, more) == unknown_in(frame, wide) == "field"
    assert unknown_in(None, body) == "kind"


def _connect(address: str) -> socket.socket:
    if address.startswith("unix://"):
        stranger = socket.socket(socket.AF_UNIX)
        stranger.connect(address.removeprefix("unix://"))
    else:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        stranger = socket.create_connection((host, int(port)))
    stranger.settimeout(20.0)
    return stranger


def _frames(stranger: socket.socket, *, is_unix: bool) -> list[Frame]:
    """All that was said, up to the end of the connection."""
    received = b""
    while True:
        try:
            read = stranger.recv(65_536)
        except ConnectionResetError:
            break
        if not read:
            break
        received += read
    received = received[20:] if is_unix else received
    frames: list[Frame] = []
    while received:
        header = parse_header(received[:HEADER_BYTES])
        end = HEADER_BYTES + header.body_bytes
        frame = parse_body(header, received[HEADER_BYTES:end])
        assert frame is not None
        frames.append(frame)
        received = received[end:]
    return frames
