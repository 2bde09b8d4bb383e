"""A session inside one process: delays, cuts and stalls under an injected schedule."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from pdserve.errors import Incompatible, PdserveError
from pdserve.messages import Down, Up
from pdserve.service.inbox import LIMIT, Inbox
from pdserve.service.outbox import DEFAULT_LIMIT, Outbox

S = TypeVar("S")
R = TypeVar("R")

LINGER_S = 1.0  # how long a closed end still tries to deliver what it had queued

Schedule = Callable[[float, Callable[[], None]], object]
"""Calls a function after so many seconds, as `loop.call_later` does; equal times in the order of the calls."""


class MemoryWire:
    """One session: its two ends and what lies between them. Event-loop thread only.

    schedule      the loop's call_later
    delay         seconds that the next message takes, drawn for each; the order is kept whatever it says
    silent_s      how long a cut may last before keepalive ends the session on both sides
    outbox_limit  see Outbox
    """

    def __init__(
        self,
        schedule: Schedule,
        delay: Callable[[], float],
        *,
        worker: str = "worker",
        router: str = "router",
        silent_s: float = 2.0,
        outbox_limit: int = DEFAULT_LIMIT,
    ) -> None:
        self._schedule = schedule
        self._silent_s = silent_s
        self._cut_number = 0
        self._up: _Pipe[Up] = _Pipe(schedule, delay, worker, outbox_limit)
        self._down: _Pipe[Down] = _Pipe(schedule, delay, router, outbox_limit)
        self.worker_end: MemorySession[Up, Down] = MemorySession(router, self._up, self._down)
        self.router_end: MemorySession[Down, Up] = MemorySession(worker, self._down, self._up)

    def cut(self, *, up: bool = True, down: bool = True) -> None:
        """Nothing passes any more in these directions; it is held, as TCP would, for `heal`.

        Pings need both ways: after `silent_s` both ends find the session ended, whichever way is cut.
        """
        self._up.cut |= up
        self._down.cut |= down
        self._cut_number += 1
        number = self._cut_number
        self._schedule(self._silent_s, lambda: self._end_if_still(number))

    def stall(self, *, up: bool = True, down: bool = True) -> None:
        """Nothing passes in these directions but pings are answered, until `heal`: a reader that doesn't read."""
        self._up.stalled |= up
        self._down.stalled |= down

    def heal(self) -> None:
        """End cuts and stalls; what was held is delivered if the session still lives."""
        self._cut_number += 1
        self._up.release()
        self._down.release()

    def reset(self, reason: str = "connection reset") -> None:
        """End the session on both sides at once; what is on its way is lost."""
        self._up.break_off()
        self._down.break_off()
        self.worker_end.end(reason)
        self.router_end.end(reason)

    def kill_worker(self) -> None:
        """The worker's process is killed: what it has sent still arrives, what it had queued doesn't."""
        self._down.break_off()
        self.worker_end.kill()

    def kill_router(self) -> None:
        """The same for the router's."""
        self._up.break_off()
        self.router_end.kill()

    def _end_if_still(self, number: int) -> None:
        if number == self._cut_number:
            self.reset("keepalive: no answer")


class MemorySession(Generic[S, R]):
    """One end; see `pdserve.session.Session`. Made by MemoryWire."""

    def __init__(self, peer: str, outward: _Pipe[S], inward: _Pipe[R]) -> None:
        self._peer = peer
        self._outward = outward
        self._inbox = Inbox[R](peer, inward.pump)
        inward.attach(self._inbox, self.end)
        self._closed = False

    @property
    def peer(self) -> str:
        return self._peer

    @property
    def ended(self) -> bool:
        """Whether this end was closed, or has learned that the other was."""
        return self._closed or self._inbox.ended

    def send(self, message: S) -> None:
        if self.ended:
            return
        if not self._outward.send(message):
            self._closed = True
            self._inbox.discard("slow consumer")
            self._outward.abandon("slow consumer")

    def when_idle(self, source: Callable[[], S | None]) -> Callable[[], None]:
        return self._outward.when_idle(source)

    async def receive(self) -> R:
        return await self._inbox.get()

    def close(self, reason: str) -> None:
        if self.ended:
            return
        self._closed = True
        self._inbox.discard(reason)
        self._outward.finish(reason)

    def refuse(self, error: PdserveError) -> None:
        if not self.ended:
            self._outward.misfit = error if isinstance(error, Incompatible) else None
            self.close(str(error))

    def end(self, reason: str, misfit: Incompatible | None = None) -> None:
        """The other end, or the wire, is gone; what has arrived can still be read."""
        self._inbox.end(reason, misfit)
        self._outward.break_off()

    def kill(self) -> None:
        """This end's process is gone."""
        self._closed = True
        self._inbox.discard("killed")
        self._outward.kill("its process is gone")


class _Pipe(Generic[S]):
    """One direction: each message arrives after its own delay, or with its predecessor if that takes longer."""

    def __init__(self, schedule: Schedule, delay: Callable[[], float], sender: str, limit: int) -> None:
        self.cut = False
        self.stalled = False
        self.misfit: Incompatible | None = None  # why the sender will never have the reader
        self._sender = sender
        self._schedule = schedule
        self._delay = delay
        self._outbox: Outbox[S] = Outbox(limit)
        self._idle: Callable[[], S | None] = lambda: None
        self._flying: deque[_Flight[S]] = deque()
        self._finish_reason: str | None = None
        self._abandon_reason: str | None = None
        self._end_is_sent = False
        self._pump_is_due = False
        self._broken = False
        self._inbox: Inbox[S]
        self._end: Callable[[str, Incompatible | None], None]

    def attach(self, inbox: Inbox[S], end: Callable[[str, Incompatible | None], None]) -> None:
        """Where messages arrive, and who is told of the end."""
        self._inbox = inbox
        self._end = end

    def send(self, message: S) -> bool:
        """Queue a message; it leaves on the loop's next turn, as from a writer task. False = over the bound."""
        if self._broken:
            return True
        if not self._outbox.put(message):
            return False
        self._pump_soon()
        return True

    def when_idle(self, source: Callable[[], S | None]) -> Callable[[], None]:
        """What to send when nothing else waits; returns what tells that there is something again."""
        self._idle = source
        self._pump_soon()
        return self._pump_soon

    def pump(self) -> None:
        """Put queued messages on the wire, as far as the reader has room for them."""
        while not (self.cut or self.stalled or self._broken):
            if len(self._flying) + len(self._inbox) >= LIMIT and not self._inbox.ended:
                return
            message = self._outbox.take()
            if message is None and self._finish_reason is None:
                message = self._idle()
            if message is None and (self._finish_reason is None or self._end_is_sent):
                return
            flight = _Flight(message)
            self._flying.append(flight)
            self._schedule(max(0.0, self._delay()), lambda flight=flight: self._land(flight))  # type: ignore[misc]
            if message is None:
                self._end_is_sent = True
                return

    def finish(self, reason: str) -> None:
        """The sender closed: what is queued still goes, then the end; after LINGER_S the end alone."""
        self._finish_reason = reason
        self._pump_soon()
        self._schedule(LINGER_S, lambda: self.abandon(reason))

    def abandon(self, reason: str) -> None:
        """The sender is gone: what is on its way is lost; the reader learns it unless the wire is cut."""
        if not self._broken:
            self.break_off()
            self._abandon_reason = reason
            if not self.cut:
                self._tell_abandoned()

    def kill(self, reason: str) -> None:
        """The sender's process is gone: what is on its way arrives, then the end."""
        self._outbox.clear()
        if self._finish_reason is None:
            self._finish_reason = reason
        self._pump_soon()

    def break_off(self) -> None:
        """Nothing passes any more, for good."""
        self._broken = True
        self._flying.clear()
        self._outbox.clear()

    def release(self) -> None:
        """End a cut or stall."""
        was_cut, self.cut, self.stalled = self.cut, False, False
        if was_cut and self._abandon_reason is not None:
            self._tell_abandoned()
        self._deliver()
        self._pump_soon()

    def _tell_abandoned(self) -> None:
        reason = f"closed by {self._sender}: {self._abandon_reason}"
        self._schedule(max(0.0, self._delay()), lambda: self._end(reason, self.misfit))

    def _pump_soon(self) -> None:
        if not self._pump_is_due:
            self._pump_is_due = True
            self._schedule(0.0, self._pump_now)

    def _pump_now(self) -> None:
        self._pump_is_due = False
        self.pump()

    def _land(self, flight: _Flight[S]) -> None:
        flight.landed = True
        self._deliver()

    def _deliver(self) -> None:
        while self._flying and self._flying[0].landed and not (self.cut or self.stalled):
            message = self._flying.popleft().message
            if message is not None:
                self._inbox.put(message)
                continue
            self.break_off()
            self._end(f"closed by {self._sender}: {self._finish_reason}", self.misfit)


class _Flight(Generic[S]):
    """A message on its way; None is the end of the session."""

    __slots__ = ("landed", "message")

    def __init__(self, message: S | None) -> None:
        self.message = message
        self.landed = False
