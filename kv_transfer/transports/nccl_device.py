"""The communicators of one worker's device: how many there are, whose turn it is, and how each ends.

    make_id, join        settled        begin                 end                      freed
    -------------> JOINING ------> JOINED ------> (in use) ------> revoked, ENDING ------------> GONE

A device has one group of receives and one of sends under way at a time. A group of sends then finds its receives
running, whatever other pairs do, so no circle of devices waits for each other. (With two groups of receives on each of
two decode workers, and two prefill workers that serve them in opposite order, all four would stand still.)
"""

from __future__ import annotations

from collections import deque
from enum import Enum

import structlog

from kv_transfer.transports.nccl_port import Nccl
from pdserve.clock import Clock
from pdserve.errors import InvariantViolated, Overloaded, PdserveError
from pdserve.service.config import TimeoutsConfig

_POLL_LEAST_S, _POLL_MOST_S = 0.00005, 0.01
_POLL_SHARE = 0.25  # of what it has taken so far, whatever is waited for

# Of link_s: how long a group may hold the device. Who waits for one that stands still has its own turn in time, before
# lease_s; and a prefill worker that is held up by one decode worker serves the others before these give it up.
_SEND_SHARE, _RECEIVE_SHARE = 0.5, 0.75

log = structlog.get_logger()


class DeviceTurns:
    """Who may have a group on the device, one at a time, and how long it may take."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._queue: deque[object] = deque()  # the first one has its turn

    def claim(self, who: object) -> bool:
        """Whether it is this one's turn; else it will be when those before it have left."""
        if who not in self._queue:
            self._queue.append(who)
        return self._queue[0] is who

    def leave(self, who: object) -> None:
        """Its group is over, or will never be. Idempotent."""
        if who in self._queue:
            self._queue.remove(who)

    def is_free_for(self, who: object) -> bool:
        return not self._queue or self._queue[0] is who


class NcclDevice:
    """Transfer owner only. max_comms: live ones at once, those being ended included."""

    def __init__(self, nccl: Nccl, *, clock: Clock, timeouts: TimeoutsConfig, max_comms: int) -> None:
        self.nccl = nccl
        self.clock = clock
        self.link_s = timeouts.link_s
        self.lease_s = timeouts.lease_s
        self.receives = DeviceTurns(timeouts.link_s * _RECEIVE_SHARE)
        self.sends = DeviceTurns(timeouts.link_s * _SEND_SHARE)
        self.num_live = 0  # these two may be read by any thread
        self.num_ended = 0
        self._max_comms = max_comms
        self._ending: dict[int, float] = {}  # and when that began

    def join(self, unique_id: bytes, rank: int) -> int:
        """Begin a communicator. Raises Overloaded, or WorkerLost with NCCL's words."""
        if self.num_live >= self._max_comms:
            raise Overloaded("full", max_links=self._max_comms)
        comm = self.nccl.init(unique_id, rank)
        self.num_live += 1
        return comm

    def end(self, comm: int) -> None:
        """What waits for its peer gives up, then all of it is freed."""
        self.nccl.revoke(comm)
        self.nccl.abort(comm)
        self._ending[comm] = self.clock.now_s()

    def is_gone(self, comm: int) -> bool:
        return comm not in self._ending

    def poll(self) -> None:
        """Forget what is freed. Raises InvariantViolated when an abort doesn't end: the process must."""
        now_s = self.clock.now_s()
        for comm, began_s in list(self._ending.items()):
            if self.nccl.is_aborted(comm):
                del self._ending[comm]
                self.num_live -= 1
                self.num_ended += 1
                log.debug("nccl.ended", comm=comm, took_s=round(now_s - began_s, 4))
            elif now_s >= began_s + self.lease_s:
                raise InvariantViolated(
                    "a communicator can't be freed: the device may still touch memory that is in use",
                    waited_s=round(now_s - began_s, 3),
                )

    # --- time

    def next_due_s(self) -> float | None:
        return min((self.look_s(began_s) for began_s in self._ending.values()), default=None)

    def look_s(self, began_s: float) -> float:
        """When to look again at what began then: a device wakes nobody."""
        now_s = self.clock.now_s()
        return now_s + min(max((now_s - began_s) * _POLL_SHARE, _POLL_LEAST_S), _POLL_MOST_S)


class _Phase(Enum):
    ALONE = "alone"
    JOINING = "joining"
    JOINED = "joined"
    LEFT = "left"


class Membership:
    """One connection's place in a communicator: the Joining of the port. Transfer owner only."""

    def __init__(self, device: NcclDevice) -> None:
        self.is_used = False
        self.comm: int | None = None
        self._device = device
        self._phase = _Phase.ALONE
        self._began_s = 0.0
        self._reason = ""

    def make_id(self) -> bytes:
        return self._device.nccl.make_unique_id()

    def join(self, unique_id: bytes, rank: int) -> None:
        self._phase = _Phase.JOINING
        self._began_s = self._device.clock.now_s()
        try:
            self.comm = self._device.join(unique_id, rank)
        except Overloaded:
            raise
        except PdserveError as error:
            self._leave(str(error))

    def outcome(self) -> str | None:
        if self._phase is _Phase.JOINING and self.comm is not None:
            self._look(self.comm)
        if self._phase is _Phase.LEFT:
            return self._reason
        return "" if self._phase is _Phase.JOINED else None

    def _look(self, comm: int) -> None:
        waited_s = self._device.clock.now_s() - self._began_s
        try:
            if self._device.nccl.is_settled(comm):
                self._phase = _Phase.JOINED
            elif waited_s >= self._device.link_s:
                self._leave(f"the communicator wasn't made within {waited_s:.1f} s")
        except PdserveError as error:
            self._leave(str(error))

    def use(self) -> None:
        self.is_used = True

    def leave(self) -> None:
        self._leave("")

    def _leave(self, reason: str) -> None:
        if self._phase is not _Phase.LEFT:
            self._phase = _Phase.LEFT
            self._reason = reason
            if self.comm is not None:
                self._device.end(self.comm)

    @property
    def is_gone(self) -> bool:
        """Whether nothing of it will touch memory again."""
        return self.comm is None or (self._phase is _Phase.LEFT and self._device.is_gone(self.comm))

    def next_due_s(self) -> float | None:
        return self._device.look_s(self._began_s) if self._phase is _Phase.JOINING else None
