"""Frames survive their way over the wire, however it is cut; anything else is refused with the name of a field."""

from __future__ import annotations

import socket

import msgpack
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer import frames
from kv_transfer.frames import FRAME_CLASSES, Data, Frame, Kind
from kv_transfer.framing import HEADER_BYTES, encode, enveloped, parse_body, parse_header
from kv_transfer.link_facts import LinkFacts
from kv_transfer.transports.stream_channel import StreamChannel
from pdserve.errors import Failure, InvalidRequest
from pdserve.ids import Epoch, WorkerRef
from pdserve.kv_memory import ByteSpan, HostMemory
from pdserve.sampling import TokenLogprobs

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
text = st.text(max_size=64)
refs = st.builds(WorkerRef, st.text(min_size=1, max_size=64), st.builds(Epoch, u64, u64))
failures = st.builds(Failure, text, text, st.dictionaries(text, text, max_size=4))
facts = st.builds(
    LinkFacts,
    layout_json=text,
    weights_fingerprint=text,
    tokenizer_fingerprint=text,
    numerics=text,
    deterministic=st.booleans(),
    state_kinds=st.lists(text, max_size=3).map(tuple),
    tp_rank=u32,
    tp_size=u32,
    checksum=text,
    checksums=st.none() | st.lists(text, max_size=3).map(tuple),
    wire=st.tuples(u32, u32),
    role_generation=u64,
)
reals = st.floats(allow_nan=False)
logprobs = st.builds(TokenLogprobs, reals, st.lists(st.tuples(u32, reals), max_size=4).map(tuple))
pieces = st.builds(frames.PulledPiece, u64, u64, u64, st.integers(1, 4 << 20))
ids = st.lists(u32, max_size=5).map(tuple)
readies = st.builds(
    lambda lease, ids, more: frames.Ready(lease, min(2**32 - 1, len(ids) + more), ids), u64, ids, u32
)

FRAMES: dict[type[Frame], st.SearchStrategy[Frame]] = {
    frames.LinkHello: st.builds(
        frames.LinkHello.of,
        sender=refs,
        receiver=refs,
        generation=u32,
        facts=facts,
        num_blocks=u32,
        nonce=st.binary(min_size=32, max_size=32),
        secret=st.booleans(),
    ),
    frames.Proof: st.builds(frames.Proof, st.binary(min_size=32, max_size=32)),
    frames.Bye: st.builds(frames.Bye.of, failures),
    frames.Ping: st.builds(frames.Ping),
    frames.Pong: st.builds(frames.Pong),
    frames.Ready: readies,
    frames.Pull: st.builds(frames.Pull, u64, st.lists(pieces, max_size=5).map(tuple)),
    frames.Data: st.builds(frames.Data, u64, u64, u64),
    frames.Commit: st.builds(frames.Commit.of, u64, u32, u32, st.none() | logprobs),
    frames.Ack: st.builds(frames.Ack, u64),
    frames.Confirm: st.builds(frames.Confirm, u64),
    frames.Released: st.builds(frames.Released, u64),
    frames.Withdraw: st.builds(frames.Withdraw.of, u64, failures),
    frames.Fail: st.builds(frames.Fail.of, u64, failures),
    frames.StaleLease: st.builds(frames.StaleLease, u64, st.integers(0, 255)),
}
"""What a peer may send, by kind."""
any_frame: st.SearchStrategy[Frame] = st.one_of(
    [drawn for kind, drawn in FRAMES.items() if kind is not frames.Data]
)


def _parse(wire: bytes) -> Frame:
    frame = parse_body(parse_header(wire[:HEADER_BYTES]), wire[HEADER_BYTES:])
    assert frame is not None
    return frame


def _read(wire: bytes) -> Frame | InvalidRequest | None:
    """The frame, or the error that refuses it; None: skipped."""
    try:
        header = parse_header(wire[:HEADER_BYTES])
        return parse_body(header, wire[HEADER_BYTES : HEADER_BYTES + header.body_bytes])
    except InvalidRequest as error:
        return error


@given(any_frame, u32)
def test_a_frame_is_read_as_it_was_written(frame: Frame, generation: int) -> None:
    wire = encode(frame, generation)
    assert _parse(wire) == frame
    assert parse_header(wire[:HEADER_BYTES]).generation == generation


@given(any_frame, st.data())
def test_any_flipped_bit_is_noticed(frame: Frame, data: st.DataObject) -> None:
    wire = bytearray(encode(frame, 7))
    index = data.draw(st.integers(0, len(wire) - 1))
    wire[index] ^= 1 << data.draw(st.integers(0, 7))
    assert isinstance(_read(bytes(wire)), InvalidRequest)


json_like = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner, max_size=5),
    max_leaves=12,
)


@given(st.sampled_from(list(FRAME_CLASSES)), st.data())
def test_any_body_is_read_or_refused_by_a_fields_name(kind: int, data: st.DataObject) -> None:
    """With the frame's own field names and foreign values, so that every check is reached."""
    names = [
        "lease",
        "upto",
        "block_ids",
        "pieces",
        "tag",
        "sum",
        "num_blocks",
        "first_token",
        "logprob",
        "top",
        "of",
    ]
    names += [
        "error",
        "message",
        "fields",
        "wire",
        "sender",
        "receiver",
        "generation",
        "layout",
        "nonce",
        "secret",
    ]
    body = data.draw(json_like | st.dictionaries(st.sampled_from(names), json_like, max_size=len(names)))
    _is_read_or_refused(kind, msgpack.packb(body))


@settings(max_examples=500)
@given(st.sampled_from([*FRAMES]), st.data())
def test_a_mutated_body_is_read_or_refused_by_a_fields_name(kind: type[Frame], data: st.DataObject) -> None:
    """Bytes changed, put in, taken out, as only a peer that sums them up afterwards can send them."""
    body = bytearray(encode(data.draw(FRAMES[kind]), 1, 1)[HEADER_BYTES:])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(body)))
        body[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    _is_read_or_refused(kind.kind, bytes(body))


def _is_read_or_refused(kind: int, body: bytes) -> None:
    read = _read(enveloped(Kind(kind), body, 1, 1 if kind == Kind.DATA else 0))
    if isinstance(read, InvalidRequest):
        assert read.fields["field"]
    else:
        assert read is not None and read.kind == kind


@given(any_frame)
def test_bodies_are_msgpack_to_others_too(frame: Frame) -> None:
    """The same bytes as an implementation of its own writes for the same map."""
    body = encode(frame, 1)[HEADER_BYTES:]
    assert msgpack.packb(msgpack.unpackb(body)) == body


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES + 64))
def test_noise_is_refused(noise: bytes) -> None:
    read = _read(noise)
    assert isinstance(read, InvalidRequest) and read.fields["field"]


class _Watch:
    """The part of the network that a channel talks to; here nobody waits."""

    def want_write(self, _channel: StreamChannel, _sock: socket.socket, *, wanted: bool) -> None:
        assert wanted in (True, False)

    def drop(self, _sock: socket.socket) -> None:
        return


class _Collector:
    """A sink that keeps what comes; payloads are placed one behind the other."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.memory = HostMemory(6 * 9000)
        self.spans: list[ByteSpan] = []

    def place(self, _data: Data, _generation: int, num_bytes: int) -> ByteSpan:
        self.spans.append(ByteSpan(self.spans[-1].end if self.spans else 0, num_bytes))
        return self.spans[-1]

    def on_frame(self, frame: Frame, generation: int) -> None:
        assert generation == 3
        self.frames.append(frame)

    def on_unknown(self, _what: str) -> None:
        raise AssertionError

    def on_done(self, _tag: int) -> None:
        raise AssertionError


payloads = st.integers(1, 9000).map(lambda num_bytes: bytes(index * 31 % 256 for index in range(num_bytes)))
messages = st.lists(any_frame | payloads, max_size=6)


@given(messages, st.lists(st.integers(1, 7000), min_size=1, max_size=12))
def test_a_stream_is_read_the_same_however_it_is_cut(sent: list[Frame | bytes], cuts: list[int]) -> None:
    stream = b""
    for index, message in enumerate(sent):
        if isinstance(message, bytes):
            stream += encode(Data(index, index, 0), 3, len(message)) + message
        else:
            stream += encode(message, 3)
    near, far = socket.socketpair()
    near.setblocking(False)
    sink = _Collector()
    channel = StreamChannel(_Watch(), sink.memory)
    channel.start(near, "stream-unix", "test")
    try:
        position, turn = 0, 0
        while position < len(stream):
            position += far.send(stream[position : position + cuts[turn % len(cuts)]])
            turn += 1
            channel.is_readable = True
            while channel.receive(sink):
                pass
    finally:
        far.close()
        near.close()
    controls = [message for message in sent if not isinstance(message, bytes)]
    assert [frame for frame in sink.frames if not isinstance(frame, Data)] == controls
    assert [bytes(sink.memory.view(span)) for span in sink.spans] == [m for m in sent if isinstance(m, bytes)]
