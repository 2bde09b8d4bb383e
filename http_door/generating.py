"""Requests for text, of whatever endpoint: events of all its prompts, as one answer or as a stream of parts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping, Sequence
from types import MappingProxyType

import msgspec

from http_door.answer import HttpAnswer, Json, TokenBytes
from http_door.connection import Connection
from http_door.errors import reply_to
from http_door.event_stream import COMMENT_S, EventStream
from http_door.metrics import HttpMetrics
from http_door.port import Visit
from pdserve.errors import InvariantViolated, PdserveError, primary
from pdserve.request import Event, GenerateRequest

_DONE = b"data: [DONE]\n\n"
_WAITING = 64  # events of all prompts together that the client hasn't taken

_encode = msgspec.json.Encoder().encode


async def give_whole(answer: HttpAnswer, visit: Visit, client: Connection, headers: dict[str, str]) -> None:
    """One JSON object when all has ended. Raises what a request ended with."""
    async with client.while_there(), _events(answer.requests, visit) as events:
        async for place, event in events:
            spelled = await _spelled(visit, answer.ids_to_spell(event))
            for _ in answer.take(place, event, spelled):
                raise InvariantViolated("a part was made for a client that doesn't stream")
    await client.answer(200, _encode(answer.whole()), headers)


async def give_stream(
    answer: HttpAnswer,
    visit: Visit,
    client: Connection,
    headers: dict[str, str],
    metrics: HttpMetrics,
    *,
    comment_s: float = COMMENT_S,
    names: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Server-sent events. Raises what a request ended with before anything was written; later it is an event.

    names  see `reply_to`
    """
    stream = EventStream(client, headers, comment_s)
    with metrics.open_streams.track_inprogress():
        try:
            async with (
                client.while_there(),
                stream.kept_open(),
                _events(answer.requests, visit) as events,
            ):
                async for place, event in events:
                    wanted = answer.ids_to_spell(event)
                    spelled = await _spelled(visit, wanted) if wanted else {}
                    if content := b"".join([_line(part) for part in answer.take(place, event, spelled)]):
                        await stream.write(content)
                    else:
                        await stream.begin()
                await stream.begin()
        except PdserveError as error:
            if client.status == 0:
                raise
            # No [DONE]: whoever waits for it must not take this for a whole answer.
            await client.end(_line(reply_to(error, names).content))
            return
        done = _DONE if answer.ends_with_done else b""
        await client.end(b"".join([*(_line(part) for part in answer.end()), done]))


_Placed = tuple[int, Event]


def _line(part: Json) -> bytes:
    """One event; it has a name where its content has a type."""
    name = f"event: {part['type']}\n".encode() if "type" in part else b""
    return name + b"data: " + _encode(part) + b"\n\n"


async def _spelled(visit: Visit, wanted: Collection[int]) -> TokenBytes:
    ids = sorted(set(wanted))
    return dict(zip(ids, await visit.token_bytes(ids))) if ids else {}


@contextlib.asynccontextmanager
async def _events(
    requests: Sequence[GenerateRequest], visit: Visit
) -> AsyncIterator[AsyncGenerator[_Placed, None]]:
    """Events of all requests with their places. At the end of the block all requests have ended."""
    if len(requests) == 1:
        async with contextlib.aclosing(_placed(0, visit.generate(requests[0]))) as only:
            yield only
        return
    queue: asyncio.Queue[_Placed | PdserveError | None] = asyncio.Queue(_WAITING)
    try:
        async with (
            asyncio.TaskGroup() as group,
            contextlib.aclosing(_merged(queue, len(requests))) as merged,
        ):
            tasks = [
                group.create_task(_run(_placed(place, visit.generate(request)), queue))
                for place, request in enumerate(requests)
            ]
            try:
                yield merged
            finally:
                for task in tasks:
                    task.cancel()
    except BaseExceptionGroup as group_of_one:
        raise primary(group_of_one) from None


async def _placed(place: int, events: AsyncGenerator[Event, None]) -> AsyncGenerator[_Placed, None]:
    async with contextlib.aclosing(events):
        async for event in events:
            yield place, event


async def _run(
    events: AsyncGenerator[_Placed, None], queue: asyncio.Queue[_Placed | PdserveError | None]
) -> None:
    """All events of one request into the queue; then how it ended."""
    end: PdserveError | None = None
    try:
        async with contextlib.aclosing(events):
            async for placed in events:
                await queue.put(placed)
    except PdserveError as error:
        end = error
    await queue.put(end)


async def _merged(
    queue: asyncio.Queue[_Placed | PdserveError | None], num_open: int
) -> AsyncGenerator[_Placed, None]:
    """Until all have ended well, or the first has failed."""
    while num_open:
        item = await queue.get()
        if isinstance(item, PdserveError):
            raise item
        if item is None:
            num_open -= 1
        else:
            yield item
