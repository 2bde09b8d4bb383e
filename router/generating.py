"""One call that generates, whichever gRPC service it came by: read, begun, and ended with its call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from pdserve.errors import RequestCancelled
from pdserve.request import GenerateRequest, Limits
from router.app import RouterApp
from router.caller_interceptor import asker_of_call, caller_of_call
from router.conductor import Conductor
from router.gate import Gate
from router.summary import refusals_told
from router.traceparent import traceparent_of


@asynccontextmanager
async def generating(
    app: RouterApp,
    gate: Gate,
    context: Any,
    request_id: str,
    read: Callable[[Limits], GenerateRequest],
    *,
    num_bytes: int,
    user: str = "",
) -> AsyncIterator[Conductor]:
    """Its events, while it is entered; behind it, nothing is computed for it any longer. In the call's own task.

    request_id  as it came, for the log of a refusal
    read        makes the request of the call's message, of so many bytes; raises InvalidRequest
    user        whose request it says it is
    """
    place, caller = gate.take_place(), caller_of_call()
    asker = asker_of_call(context, user)
    with refusals_told(request_id, app.metrics):
        asked = await app.read(read, asker, num_bytes)
    generation = app.begin(
        asked,
        caller=caller,
        place=place,
        asker=asker,
        deadline_left_s=context.time_remaining(),
        traceparent=traceparent_of(context.invocation_metadata()),
    )
    stall = _Stall()
    generation.on_stalled = stall.end_write
    try:
        yield generation
    except asyncio.CancelledError:
        stall.raise_if_over()
        raise
    finally:  # also when gRPC cancels this call because the client is gone
        generation.close()


class _Stall:
    """Ends the write in which a call hangs whose client doesn't read; made in the call's own task."""

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._over = False

    def end_write(self) -> None:
        """The client is given up."""
        self._over = True
        self._task.cancel()

    def raise_if_over(self) -> None:
        """In place of a CancelledError that came from here, so that the client gets a status."""
        if self._over:
            self._task.uncancel()
            raise RequestCancelled("the client doesn't read its stream")
