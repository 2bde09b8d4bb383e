"""What waits for one client: its own buffer, so that nobody else waits for it.

Bounded by what a request can produce (max_tokens of each choice). Tokens that the client hasn't taken yet grow into
one event. A client that leaves something lying for `client_stall_s` is given up.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from pdserve.clock import Clock
from pdserve.errors import PdserveError
from pdserve.request import Event, Tokens
from router.progress_timer import ProgressTimer


class _Entry:
    """make is called when the client takes the entry, with the moment of that."""

    __slots__ = ("make", "put_s")

    def __init__(self, make: Callable[[float], Event], put_s: float) -> None:
        self.make = make
        self.put_s = put_s


class _TokenEntry(_Entry):
    """Tokens of one choice, still growing."""

    __slots__ = ("choice", "first_index", "logprobs", "texts", "token_ids")

    def __init__(self, event: Tokens, put_s: float) -> None:
        super().__init__(self._joined, put_s)
        self.choice = event.choice
        self.first_index = event.first_index
        self.token_ids = list(event.token_ids)
        self.texts = [event.text]
        self.logprobs = list(event.logprobs)

    def add(self, event: Tokens) -> None:
        assert event.first_index == self.first_index + len(self.token_ids), "token events leave no gap"
        self.token_ids.extend(event.token_ids)
        self.texts.append(event.text)
        self.logprobs.extend(event.logprobs)

    def _joined(self, now_s: float) -> Tokens:
        return Tokens(
            choice=self.choice,
            first_index=self.first_index,
            token_ids=tuple(self.token_ids),
            text="".join(self.texts),
            logprobs=tuple(self.logprobs),
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

    def put(self, event: Event) -> None:
        """Add an event; tokens join those of the same choice that are last in line."""
        if not isinstance(event, Tokens):
            self.put_made(lambda now_s: event)
            return
        last = self._entries[-1] if self._entries else None
        if isinstance(last, _TokenEntry) and last.choice == event.choice:
            last.add(event)
        else:
            self._append(_TokenEntry(event, self._clock.now_s()))

    def put_made(self, make: Callable[[float], Event]) -> None:
        """Add an event that is made when the client takes it."""
        self._append(_Entry(make, self._clock.now_s()))

    def end(self) -> None:
        """Nothing comes any more."""
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
        while not self._entries and not self._ended:
            assert self._waiter is None, "an output has one reader"
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
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
        return entry.make(now_s)

    def _append(self, entry: _Entry) -> None:
        if self._ended:
            return
        self._entries.append(entry)
        if len(self._entries) == 1:
            self._timer.restart(self._stall_s)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
