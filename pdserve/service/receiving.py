"""Messages that are just coming in: so many at a time, whoever sends them and however slowly.

gRPC itself takes in the whole of every message that a server reads, up to the largest one, for each call; a crowd that
sends all but the last byte would fill the memory. What isn't read waits in the flow-control window of its connection.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter

from pdserve.clock import Clock
from pdserve.errors import Overloaded
from pdserve.service.config import Config

PATIENCE_S = 1.0
"""Who is slower makes room when others wait: a small message comes whole at once."""


def most_at_once(config: Config, message_bytes: int) -> int:
    """How many may come in together, messages of this size or bodies of the HTTP door, if there is one."""
    body_bytes = config.http.max_body_bytes if config.http.listen else 0
    return max(1, config.router.max_receiving_bytes // max(message_bytes, body_bytes))


def count_of_refused(registry: CollectorRegistry) -> Counter:
    """The metric of those that made room."""
    return Counter(
        "pdserve_receiving_refused",
        "Calls refused as their messages came slowly, or many at once, above router.max_receiving_bytes.",
        registry=registry,
    )


@dataclass(eq=False, slots=True)
class _Arriving:
    user: str
    begun_s: float
    given_up: asyncio.Future[None]


class Receiving:
    """Event-loop thread only.

    most        messages at a time; above it whoever has more of them than others, or is slow, makes room
    on_refused  told of each that made room
    """

    def __init__(self, most: int, clock: Clock, on_refused: Callable[[], None]) -> None:
        self._most = most
        self._clock = clock
        self._on_refused = on_refused
        self._arriving: list[_Arriving] = []  # the oldest first
        self._door = asyncio.Lock()
        self._changed = asyncio.Event()

    async def take(self, read: Callable[[], Awaitable[bytes]], user: str) -> bytes:
        """A message, when it is whole. Raises Overloaded if it made room for another."""
        async with self._door:  # in the order in which they came
            await self._until_there_is_room(user)
            mine = _Arriving(user, self._clock.now_s(), asyncio.get_running_loop().create_future())
            self._arriving.append(mine)
        reading = asyncio.ensure_future(read())
        try:
            await asyncio.wait((reading, mine.given_up), return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                return reading.result()
            self._on_refused()
            raise Overloaded(
                "the message came too slowly, or beside too many others of its sender",
                retry_after_s=PATIENCE_S,
            )
        finally:
            reading.cancel()
            self._arriving.remove(mine)
            self._changed.set()

    async def _until_there_is_room(self, user: str) -> None:
        while len(self._arriving) >= self._most:
            self._changed.clear()
            staying = [each for each in self._arriving if not each.given_up.done()]
            wait_s: float | None = None
            if len(staying) >= self._most:
                who, due_s = self._next_to_go(staying, user)
                wait_s = due_s - self._clock.now_s()
                if wait_s <= 0:
                    who.given_up.set_result(None)
                    continue
            with contextlib.suppress(TimeoutError):  # then somebody has been slow
                await asyncio.wait_for(self._changed.wait(), wait_s)

    def _next_to_go(self, staying: list[_Arriving], user: str) -> tuple[_Arriving, float]:
        """Of the user who has most, if that is more than this one would have: now; else the oldest, when it is slow."""
        counts = collections.Counter(each.user for each in staying)
        greediest, most = counts.most_common(1)[0]
        if most > counts[user] + 1:
            return next(each for each in staying if each.user == greediest), 0.0
        return staying[0], staying[0].begun_s + PATIENCE_S
