"""The groups of one connection's communicator: D's receives, P's sends. One of each is under way at a time.

A group is what one PULL asks for, at most MAX_PULLED_PIECES: the same pieces in the same order at both ends.

    D  posted ... PULL waits -> on the device -> settled: event, PULL goes -> event over, DATA has come -> the link's
    P  PULL has come -> as many sends handed over -> on the device -> settled: event, DATA goes -> event over
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from kv_transfer.frames import Data
from kv_transfer.transports.nccl_device import DeviceTurns, NcclDevice
from pdserve.errors import InvalidRequest, WorkerLost
from pdserve.kv_memory import ByteSpan

Send = Callable[[bytes], None]


class Announced(NamedTuple):
    """The DATA frame of a piece, as it came."""

    data: Data
    generation: int
    num_bytes: int


class _Posted(NamedTuple):
    tag: int
    into: ByteSpan


class _Piece(NamedTuple):
    """span: where it lies; None: bytes without meaning."""

    wire: bytes
    span: ByteSpan | None
    num_bytes: int


@dataclass(slots=True, eq=False)
class _OnDevice:
    """A group that was handed over. event: behind it, once it has settled."""

    began_s: float
    event: int | None = None
    is_over: bool = False


class _Group:
    """Follows the one group under way. comm: of one connection."""

    def __init__(self, device: NcclDevice, comm: int, turns: DeviceTurns) -> None:
        self._device = device
        self._nccl = device.nccl
        self._comm = comm
        self._turns = turns
        self._on_device: _OnDevice | None = None
        self._num_on_device = 0
        self._is_dead = False

    @property
    def is_free(self) -> bool:
        return self._on_device is None

    @contextmanager
    def _handing_over(self) -> Iterator[None]:
        """A group. From its first piece on the device may touch memory, whatever fails then."""
        self._on_device = _OnDevice(self._device.clock.now_s())
        self._nccl.begin_group()
        yield
        self._nccl.end_group(self._comm)

    def _follow(self, group: _OnDevice) -> bool:
        """Look at the group. True: it has settled just now, or it is over just now. Raises WorkerLost."""
        if group.is_over:
            return False
        waited_s = self._device.clock.now_s() - group.began_s
        if waited_s >= self._turns.limit_s:
            raise WorkerLost("NCCL doesn't get done with a group", waited_s=round(waited_s, 3))
        if group.event is None:
            if not self._nccl.is_settled(self._comm):
                return False
            group.event = self._nccl.record(self._comm)
            return True
        if not self._nccl.is_over(group.event):
            return False
        self._nccl.is_settled(
            self._comm
        )  # an event is over, too, when the kernels before it gave up: raises then
        group.is_over = True
        self._turns.leave(self)
        return True

    def _is_ready(self) -> bool:
        """Whether a group could be handed over."""
        raise NotImplementedError

    def _die(self) -> None:
        self._is_dead = True
        self._turns.leave(self)

    def next_due_s(self) -> float | None:
        group = self._on_device
        if group is not None:
            return None if group.is_over else self._device.look_s(group.began_s)
        if self._is_dead or not self._is_ready() or not self._turns.is_free_for(self):
            return None
        return self._device.clock.now_s()


class Receives(_Group):
    """D's. A piece is the link's when its group is over and its DATA has come."""

    def __init__(self, device: NcclDevice, comm: int) -> None:
        super().__init__(device, comm, device.receives)
        self._posted: deque[_Posted] = deque()  # those on the device first
        self._pulls: deque[tuple[bytes, int]] = deque()  # and how many pieces each asks for
        self._announced: deque[Announced] = deque()

    def post(self, tag: int, into: ByteSpan) -> None:
        self._posted.append(_Posted(tag, into))

    def pull(self, wire: bytes, num_pieces: int) -> None:
        """Goes out when the receives of its pieces, which were posted before, stand."""
        self._pulls.append((wire, num_pieces))

    def advance(self, send: Send) -> None:
        """Raises WorkerLost."""
        if self._on_device is None:
            if not self._is_ready() or not self._turns.claim(self):
                return
            self._num_on_device = self._pulls[0][1]
            with self._handing_over():
                for index in range(self._num_on_device):
                    self._nccl.receive(self._comm, self._posted[index].into)
        assert self._on_device is not None
        if not self._follow(self._on_device):
            return
        if not self._on_device.is_over:
            send(self._pulls.popleft()[0])

    def _is_ready(self) -> bool:
        return bool(self._pulls)

    def announce(self, announced: Announced) -> None:
        """Raises InvalidRequest for a piece that isn't the next one asked for."""
        index = len(self._announced)
        if index >= self._num_on_device:
            raise InvalidRequest("a piece that nobody asked for", field="tag", got=announced.data.tag)
        posted = self._posted[index]
        if (announced.data.tag, announced.num_bytes) != (posted.tag, posted.into.num_bytes):
            raise InvalidRequest(
                "a piece that isn't the next one asked for", want=posted.tag, got=announced.data.tag
            )
        self._announced.append(announced)

    def take(self) -> Announced | None:
        """The next piece that lies in its place."""
        if not self._announced or self._on_device is None or not self._on_device.is_over:
            return None
        self._posted.popleft()
        self._num_on_device -= 1
        if self._num_on_device == 0:
            self._on_device = None
        return self._announced.popleft()

    def die(self) -> list[int]:
        """The communicator is being ended. returns: tags of the receives that will not be written any longer."""
        self._die()
        if self._on_device is None or self._on_device.is_over:
            return self.bury()
        posted = list(self._posted)
        self._posted = deque(posted[: self._num_on_device])
        return [tag for tag, _into in posted[self._num_on_device :]]

    def bury(self) -> list[int]:
        """The communicator is gone: tags of those that might still have been written until now."""
        over, self._posted = [tag for tag, _into in self._posted], deque()
        return over

    @property
    def is_empty(self) -> bool:
        return not self._posted


class Sends(_Group):
    """P's. num_unsent: pieces handed over that may still be read."""

    def __init__(self, device: NcclDevice, comm: int) -> None:
        super().__init__(device, comm, device.sends)
        self.num_unsent = 0
        self._pulls: deque[int] = deque()
        self._pieces: deque[_Piece] = deque()

    def on_pull(self, num_pieces: int) -> None:
        """D's receives for so many pieces stand."""
        if num_pieces:
            self._pulls.append(num_pieces)

    def add(self, wire: bytes, span: ByteSpan | None, num_bytes: int) -> None:
        self._pieces.append(_Piece(wire, span, num_bytes))
        self.num_unsent += 1

    def advance(self, send: Send) -> None:
        """Raises WorkerLost."""
        if self._on_device is None:
            if not self._is_ready() or not self._turns.claim(self):
                return
            self._num_on_device = self._pulls.popleft()
            with self._handing_over():
                for index in range(self._num_on_device):
                    _wire, span, num_bytes = self._pieces[index]
                    if span is None:
                        self._nccl.send_blank(self._comm, num_bytes)
                    else:
                        self._nccl.send(self._comm, span)
        assert self._on_device is not None
        if not self._follow(self._on_device):
            return
        if self._on_device.is_over:
            self._on_device = None
            self.num_unsent -= self._num_on_device
        else:
            for _ in range(self._num_on_device):
                send(self._pieces.popleft().wire)

    def _is_ready(self) -> bool:
        return bool(self._pulls) and len(self._pieces) >= self._pulls[0]

    def die(self) -> None:
        """The communicator is being ended."""
        self._die()

    def bury(self) -> None:
        """It is gone: nothing is read any longer."""
        self.num_unsent = 0
