"""What waits for one client: its own buffer, so that nobody else waits for it.

Bounded by what a request can produce (max_tokens of each choice). Tokens that the client hasn't taken yet grow into
one event. A client that leaves something lying for `client_stall_s` is given up.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from pdserve.clock import Clock
from pdserve.errors import PdserveError
from pdserve.request import Event, Tokens
from router.progress_timer import ProgressTimer


@dataclass(slots=True)
class _Entry:
    """made: tokens of one choice, still growing; or what makes the event, given the moment in which it is taken."""

    put_s: float
    made: list[Tokens] | Callable[[float], Event]

    def take(self, now_s: float) -> Event:
        return _joined(self.made) if isinstance(self.made, list) else self.made(now_s)


def _joined(events: list[Tokens]) -> Tokens:
    if len(events) == 1:
        return events[0]
    return replace(
        events[0],
        token_ids=tuple(token_id for event in events for token_id in event.token_ids),
        text="".join(event.text for event in events),
        logprobs=tuple(logprobs for event in events for logprobs in event.logprobs),
    )


class Output:
    """Events of one request, from its conductor to its one reader. Event-loop thread only.

    on_stalled  called once when the client has fallen `stall_s` behind
    """

    def __init__(self, clock: Clock, stall_s: float, on_stalled: Callable[[], None]) -> None:
        self._clock = clock
        self._stall_s = stall_s
        self._entries: deque[_Entry] = deque()
        self._timer = ProgressTimer(clock, on_stalled)
        self._ended = False
        self._error: PdserveError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._all_taken = asyncio.Event()
        #: called whenever there is something to take, or the end; by default nobody is told but who waits in `take`
        self.on_ready: Callable[[], None] = lambda: None

    def put(self, event: Event) -> None:
        """Add an event; tokens join those of the same choice that are last in line."""
        if not isinstance(event, Tokens):
            self.put_made(lambda now_s: event)
            return
        made = self._entries[-1].made if self._entries else None
        if isinstance(made, list) and (last := made[-1]).choice == event.choice:
            assert event.first_index == last.first_index + len(last.token_ids), "token events leave no gap"
            made.append(event)
        else:
            self._append([event])

    def put_made(self, make: Callable[[float], Event]) -> None:
        """Add an event that is made when the client takes it."""
        self._append(make)

    def end(self) -> None:
        """Nothing follows."""
        self._ended = True
        if not self._entries:
            self._timer.stop()
            self._all_taken.set()
        self._wake()

    def fail(self, error: PdserveError) -> None:
        """What lies here is given out, then the error is raised."""
        if self._error is None:
            self._error = error
        self.end()

    def close(self) -> None:
        """Nobody reads any more."""
        self._entries.clear()
        self._timer.stop()
        self.end()

    @property
    def complete(self) -> bool:
        """Whether the request ended well and the client has taken everything."""
        return self._error is None and self._all_taken.is_set()

    async def all_taken(self) -> None:
        """Return when the client has taken everything, after `end`."""
        await self._all_taken.wait()

    async def take(self) -> Event | None:
        """The next event, None at the end; raises the error that the request ended with. One reader only."""
        while not self.ready:
            assert self._waiter is None, "an output has one reader"
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self.take_now()

    @property
    def ready(self) -> bool:
        """Whether `take_now` has an answer."""
        return bool(self._entries) or self._ended

    def take_now(self) -> Event | None:
        """As `take`, of what is there."""
        if not self._entries:
            if self._error is not None:
                raise self._error
            return None
        entry = self._entries.popleft()
        now_s = self._clock.now_s()
        if self._entries:
            self._timer.restart(max(0.0, self._entries[0].put_s + self._stall_s - now_s))
        elif self._ended:
            self._timer.stop()
            self._all_taken.set()
        else:
            self._timer.pause()
        return entry.take(now_s)

    def _append(self, made: list[Tokens] | Callable[[float], Event]) -> None:
        if self._ended:
            return
        self._entries.append(_Entry(self._clock.now_s(), made))
        if len(self._entries) == 1:
            self._timer.restart(self._stall_s)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        self.on_ready()
