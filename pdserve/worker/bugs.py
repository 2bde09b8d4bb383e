"""Outermost frames of the event loop's own work: a bug there ends the worker, and isn't only logged."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import structlog

log = structlog.get_logger()

OnBug = Callable[[Exception], None]


def ending_with(deliver: Callable[[object], None], on_bug: OnBug) -> Callable[[object], None]:
    """The same callback; what it raises goes to on_bug. The event loop would log it and go on."""

    def guarded(message: object) -> None:
        try:
            deliver(message)
        except Exception as bug:
            log.exception("worker.crashed", message=type(message).__name__)
            on_bug(bug)

    return guarded


async def until_bug(work: Awaitable[None], on_bug: OnBug) -> None:
    """Do it; what it raises goes to on_bug."""
    try:
        await work
    except Exception as bug:
        log.exception("worker.crashed")
        on_bug(bug)
