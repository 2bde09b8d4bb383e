"""The in-memory network's cuts and order, and the plans of the faulty link."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

import pytest

from kv_transfer.frames import Data, Frame, Kind, Ready
from kv_transfer.framing import encode
from kv_transfer.transports.port import Channel
from pdserve.kv_memory import ByteSpan, HostMemory
from tests.support.faulty_link import Action, Drawn, FaultyNetwork, OnKind, Scripted
from tests.support.memories import StagedMemory
from tests.support.memory_channel import MAX_QUEUED_FRAMES
from tests.support.memory_network import MemoryNetwork
from tests.support.virtual_clock import VirtualClock


class _Time:
    """A clock, and what is due on it."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def schedule(self, delay_s: float, call: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._due, (self.clock.now_s() + delay_s, self._count, call))

    def run(self) -> None:
        while self._due:
            due_s, _, call = heapq.heappop(self._due)
            self.clock.advance_to(due_s)
            call()


class _Sink:
    """Keeps what comes."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []

    def place(self, _data: Data, _generation: int, num_bytes: int) -> ByteSpan:
        return ByteSpan(0, num_bytes)

    def on_frame(self, frame: Frame, _generation: int) -> None:
        self.frames.append(frame)

    def on_unknown(self, _what: str) -> None:
        raise AssertionError

    def on_done(self, _tag: int) -> None:
        raise AssertionError


def _memory() -> StagedMemory:
    return StagedMemory(HostMemory(8))


def _network(time: _Time, *, seed: int = 1) -> MemoryNetwork:
    draw = random.Random(seed)
    return MemoryNetwork(clock=time.clock, schedule=time.schedule, delay=draw.random)


def _connect(
    time: _Time, network: MemoryNetwork, wake_near: Callable[[], None] = lambda: None
) -> tuple[Channel, Channel]:
    near = network.join("a", memory=_memory(), wake=wake_near)
    far = network.join("b", memory=_memory(), wake=lambda: None)
    channel = near.dial(far.addresses)
    time.run()
    [accepted] = far.accept()
    return channel, accepted


def _ready(number: int) -> bytes:
    return encode(Ready(number, 1), 1)


def _received(channel: Channel) -> list[int]:
    sink = _Sink()
    while channel.receive(sink):
        pass
    return [frame.lease_id for frame in sink.frames if isinstance(frame, Ready)]


def test_the_order_holds_whatever_the_delays() -> None:
    time = _Time()
    near, far = _connect(time, _network(time))
    for number in range(50):
        near.send(_ready(number))
    time.run()
    assert _received(far) == list(range(50))


def test_a_cut_is_one_way_and_holds_what_is_sent_until_it_heals() -> None:
    time = _Time()
    network = _network(time)
    near, far = _connect(time, network)
    network.cut("a", "b")
    for number in range(5):
        near.send(_ready(number))
        far.send(_ready(number))
    time.run()
    assert _received(far) == [] and _received(near) == list(range(5))
    network.heal("a", "b")
    time.run()
    assert _received(far) == list(range(5))


def _fill(channel: Channel) -> None:
    while channel.can_send_piece:
        channel.send_piece(encode(Data(1, 1, 0), 1, 8), ByteSpan(0, 8))


def test_a_sender_that_waits_for_room_is_woken() -> None:
    time, woken = _Time(), list[str]()
    near, far = _connect(time, _network(time), lambda: woken.append("near"))
    _fill(near)
    time.run()
    assert woken == []
    far.receive(_Sink())
    assert near.can_send_piece
    time.run()
    assert woken == ["near"]


def test_a_name_nobody_has_refuses() -> None:
    time = _Time()
    node = _network(time).join("a", memory=_memory(), wake=lambda: None)
    channel = node.dial(("mem://nobody",))
    channel.send(_ready(1))
    assert channel.closed_reason is None
    time.run()
    assert channel.closed_reason == "connection refused"


def test_a_later_node_takes_the_name_over() -> None:
    time = _Time()
    network = _network(time)
    near, old = _connect(time, network)
    newer = network.join("b", memory=_memory(), wake=lambda: None)
    network.join("c", memory=_memory(), wake=lambda: None).dial(newer.addresses)
    time.run()
    assert len(newer.accept()) == 1
    near.send(_ready(1))
    time.run()
    assert _received(old) == [1], "what stands goes on"


def test_a_peer_that_never_reads_costs_bounded_memory() -> None:
    time = _Time()
    near, _far = _connect(time, _network(time))
    for number in range(MAX_QUEUED_FRAMES + 1):
        near.send(_ready(number))
    assert near.closed_reason == "the peer doesn't read"


def _faulty(
    time: _Time, plan: object, sent: StagedMemory | None = None, received: StagedMemory | None = None
) -> tuple[Channel, Channel]:
    network, memory = _network(time), sent or _memory()
    far = network.join("b", memory=received or _memory(), wake=lambda: None)
    inner = network.join("a", memory=memory, wake=lambda: None)
    near = FaultyNetwork(inner, time.clock, lambda _dialled: plan, memory)  # type: ignore[arg-type, return-value]
    channel = near.dial(far.addresses)
    time.run()
    [accepted] = far.accept()
    return channel, accepted


@pytest.mark.parametrize(
    ("action", "want"),
    [
        (Action.DROP, [0, 2, 3]),
        (Action.DELAY, [0, 1, 2, 3]),
        (Action.DUPLICATE, [0, 1, 1, 2, 3]),
        (Action.REORDER, [0, 2, 3, 1]),
        (Action.DIE, [0]),
    ],
)
def test_what_happens_to_the_second_of_four(action: Action, want: list[int]) -> None:
    time = _Time()
    near, far = _faulty(time, Scripted({1: action}))
    for number in range(4):
        near.send(_ready(number))
    for _ in range(4):
        near.flush()
        time.run()
        time.clock.advance(0.05)
    assert _received(far) == want


def test_corrupt_changes_one_bit_of_the_payload_only() -> None:
    time = _Time()
    sent, received = _memory(), _memory()
    near, far = _faulty(time, OnKind(Kind.DATA, Action.CORRUPT), sent, received)
    sent.at(ByteSpan(0, 8))[:] = b"abcdefgh"
    near.send_piece(encode(Data(1, 2, 3), 1, 8), ByteSpan(0, 8))
    time.run()
    sink = _Sink()
    far.receive(sink)
    assert sink.frames == [Data(1, 2, 3)]
    assert sum(one != other for one, other in zip(received.at(ByteSpan(0, 8)), b"abcdefgh")) == 1


def test_drawn_faults_come_at_their_rates_and_again_from_the_same_seed() -> None:
    def draws(seed: int) -> list[Action | None]:
        plan = Drawn(random.Random(seed), {Action.DROP: 0.25, Action.DELAY: 0.5})
        return [plan.decide(Kind.PING, index) for index in range(4000)]

    drawn = draws(1)
    assert drawn == draws(1) != draws(2)
    assert abs(drawn.count(Action.DROP) - 1000) < 120 and abs(drawn.count(Action.DELAY) - 2000) < 150
