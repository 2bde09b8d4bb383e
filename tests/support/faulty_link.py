"""A faulty link: wraps the channels of any network, and drops, delays, duplicates, reorders, corrupts or dies.

Faults happen to whole frames as they are sent; wrapping both ends' networks makes both directions faulty. What
happens to which frame comes from a plan: scripted, or drawn from an injected Random. A posted channel's pieces and
PULLs are neither lost nor repeated nor reordered: the fabrics that it stands for don't do so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from kv_transfer.frames import Kind
from kv_transfer.framing import HEADER_BYTES, kind_of
from kv_transfer.transports.port import Channel, Joining, Network, RemoteRead, Sharing, Sink
from pdserve.clock import Clock
from pdserve.ids import Random
from pdserve.kv_memory import ByteSpan
from tests.support.memories import StagedMemory


class Action(Enum):
    """What may happen to a frame. DELAY keeps the order, REORDER lets later frames pass."""

    DROP = "drop"
    DELAY = "delay"
    DUPLICATE = "duplicate"
    REORDER = "reorder"
    CORRUPT = "corrupt"
    DIE = "die"


_UNKNOWN_TO_POSTED = (Action.DROP, Action.DUPLICATE, Action.REORDER)


class Fault(Protocol):
    """A plan for one channel's outgoing frames."""

    def decide(self, kind: Kind, index: int) -> Action | None:
        """What happens to the frame of this kind, the index-th (from 0) that this channel sends."""
        ...


@dataclass(frozen=True, slots=True)
class Scripted:
    """Faults by the index of the frame."""

    actions: Mapping[int, Action]

    def decide(self, _kind: Kind, index: int) -> Action | None:
        return self.actions.get(index)


class OnKind:
    """A fault for the n-th (from 0) frame of one kind."""

    def __init__(self, kind: Kind, action: Action, *, nth: int = 0) -> None:
        self._kind = kind
        self._action = action
        self._left = nth

    def decide(self, kind: Kind, _index: int) -> Action | None:
        if kind is not self._kind:
            return None
        self._left -= 1
        return self._action if self._left == -1 else None


class Drawn:
    """Faults by probability. rates: of each action, per frame; their sum is at most 1."""

    def __init__(self, random: Random, rates: Mapping[Action, float]) -> None:
        self._random = random
        self._rates = dict(rates)

    def decide(self, _kind: Kind, _index: int) -> Action | None:
        draw = self._random.random()
        for action, rate in self._rates.items():
            draw -= rate
            if draw < 0:
                return action
        return None


@dataclass(slots=True, eq=False)
class _Held:
    """A frame that waits: until `due_s`, and, unless `may_pass`, those behind it wait too."""

    wire: bytes
    payload: bytes | None
    due_s: float
    may_pass: bool = False


class FaultyChannel:
    """Everything but sending goes straight to the wrapped channel. delay_s: of DELAY and REORDER."""

    def __init__(
        self, inner: Channel, fault: Fault, clock: Clock, memory: StagedMemory, *, delay_s: float = 0.05
    ) -> None:
        self._inner = inner
        self._memory = memory
        self._fault = fault
        self._clock = clock
        self._delay_s = delay_s
        self._held: list[_Held] = []
        self._num_sent = 0

    @property
    def transport(self) -> str:
        return self._inner.transport

    @property
    def peer(self) -> str:
        return self._inner.peer

    @property
    def reads_itself(self) -> bool:
        return self._inner.reads_itself

    @property
    def can_detach(self) -> bool:
        return self._inner.can_detach

    @property
    def is_posted(self) -> bool:
        return self._inner.is_posted

    @property
    def pull_room(self) -> int:
        return self._inner.pull_room

    @property
    def sharing(self) -> Sharing | None:
        return self._inner.sharing

    @property
    def joining(self) -> Joining | None:
        return self._inner.joining

    @property
    def closed_reason(self) -> str | None:
        return self._inner.closed_reason

    @property
    def received_bytes(self) -> int:
        return self._inner.received_bytes

    @property
    def num_unsent_pieces(self) -> int:
        return self._inner.num_unsent_pieces + sum(held.payload is not None for held in self._held)

    @property
    def is_idle(self) -> bool:
        return self._inner.is_idle

    @property
    def can_send_piece(self) -> bool:
        return self._inner.can_send_piece and not any(held.payload is not None for held in self._held)

    def send(self, wire: bytes) -> None:
        self._suffer(wire, None)

    def send_piece(self, wire: bytes, span: ByteSpan) -> None:
        self._suffer(wire, span)

    def skip_piece(self, wire: bytes, num_bytes: int) -> None:
        self._suffer(wire, self._memory.stage(bytes(num_bytes)))

    def post_receive(self, tag: int, into: ByteSpan) -> None:
        self._inner.post_receive(tag, into)

    def detach_piece(self) -> None:
        self._inner.detach_piece()

    def divert(self, tag: int) -> bool:
        return self._inner.divert(tag)

    def read_remote(self, tag: int, reads: Sequence[RemoteRead]) -> bool:
        return self._inner.read_remote(tag, reads)

    def receive(self, sink: Sink) -> bool:
        self._release()
        return self._inner.receive(sink)

    def flush(self) -> None:
        self._release()
        self._inner.flush()

    def close(self, reason: str) -> None:
        for held in self._held:
            if held.payload is None:
                self._inner.send(held.wire)
        self._held.clear()
        self._inner.close(reason)

    def next_due_s(self) -> float | None:
        """When the next held frame may go; one that waits for room, or behind such a one, needs no clock."""
        found: float | None = None
        order_s = 0.0
        for held in self._held:
            if held.payload is not None and not self._inner.can_send_piece:
                due_s = float("inf")
            else:
                due_s = held.due_s if held.may_pass else max(held.due_s, order_s)
            if not held.may_pass:
                order_s = due_s
            found = due_s if found is None else min(found, due_s)
        return None if found == float("inf") else found

    def _suffer(self, wire: bytes, span: ByteSpan | None) -> None:
        kind = kind_of(wire)
        action = self._fault.decide(kind, self._num_sent)
        if action in _UNKNOWN_TO_POSTED and kind in (Kind.PULL, Kind.DATA) and self.is_posted:
            action = None
        self._num_sent += 1
        now_s = self._clock.now_s()
        match action:
            case None:
                self._send(wire, span, now_s)
            case Action.DROP:
                pass
            case Action.DELAY:
                self._held.append(_Held(wire, self._copy(span), now_s + self._delay_s))
            case Action.REORDER:
                self._held.append(_Held(wire, self._copy(span), now_s + self._delay_s, may_pass=True))
            case Action.DUPLICATE:
                self._send(wire, span, now_s)
                self._held.append(_Held(wire, self._copy(span), now_s))
            case Action.CORRUPT:
                wire, payload = _flip(wire, self._copy(span))
                self._send(wire, None if payload is None else self._memory.stage(payload), now_s)
            case Action.DIE:
                self._held.clear()
                self._inner.close("the faulty link died")

    def _copy(self, span: ByteSpan | None) -> bytes | None:
        return None if span is None else bytes(self._memory.at(span))

    def _send(self, wire: bytes, span: ByteSpan | None, now_s: float) -> None:
        """Now, or behind those that hold the order up."""
        if any(not held.may_pass for held in self._held):
            self._held.append(_Held(wire, self._copy(span), now_s))
        elif span is None:
            self._inner.send(wire)
        else:
            self._inner.send_piece(wire, span)

    def _release(self) -> None:
        now_s = self._clock.now_s()
        kept: list[_Held] = []
        is_blocked = False
        for held in self._held:
            is_ready = held.due_s <= now_s and (held.payload is None or self._inner.can_send_piece)
            if is_ready and (held.may_pass or not is_blocked):
                if held.payload is None:
                    self._inner.send(held.wire)
                else:
                    self._inner.send_piece(held.wire, self._memory.stage(held.payload))
            else:
                is_blocked = is_blocked or not held.may_pass
                kept.append(held)
        self._held = kept


class FaultyNetwork:
    """A network whose channels are faulty.

    make_fault  gives each new channel its plan; `dialled` says whether this side opened it. None: a sound channel
    """

    def __init__(
        self,
        inner: Network,
        clock: Clock,
        make_fault: Callable[[bool], Fault | None],
        memory: StagedMemory,
        *,
        delay_s: float = 0.05,
    ) -> None:
        self._inner = inner
        self._clock = clock
        self._make_fault = make_fault
        self._memory = memory
        self._delay_s = delay_s
        self._faulty: list[FaultyChannel] = []

    @property
    def addresses(self) -> tuple[str, ...]:
        return self._inner.addresses

    def dial(self, addresses: Sequence[str]) -> Channel:
        return self._wrap(self._inner.dial(addresses), True)

    def accept(self) -> list[Channel]:
        return [self._wrap(channel, False) for channel in self._inner.accept()]

    def poll(self) -> None:
        self._inner.poll()

    def next_due_s(self) -> float | None:
        self._faulty = [channel for channel in self._faulty if channel.closed_reason is None]
        dues = [channel.next_due_s() for channel in self._faulty]
        dues.append(self._inner.next_due_s())
        return min((due_s for due_s in dues if due_s is not None), default=None)

    def close(self) -> None:
        self._inner.close()

    def _wrap(self, channel: Channel, dialled: bool) -> Channel:
        fault = self._make_fault(dialled)
        if fault is None:
            return channel
        faulty = FaultyChannel(channel, fault, self._clock, self._memory, delay_s=self._delay_s)
        self._faulty.append(faulty)
        return faulty


def _flip(wire: bytes, payload: bytes | None) -> tuple[bytes, bytes | None]:
    """One bit other: of the payload's middle, or else of the last byte of the frame."""
    if payload is None:
        index = max(len(wire) - 1, HEADER_BYTES - 1)
        return wire[:index] + bytes([wire[index] ^ 1]), None
    copy = bytearray(payload)
    copy[len(copy) // 2] ^= 1
    return wire, bytes(copy)
