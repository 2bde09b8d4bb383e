"""Outermost frames of the event loop's own work: a bug there ends the worker, and isn't only logged."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import ParamSpec

import structlog

log = structlog.get_logger()

OnBug = Callable[[Exception], None]
P = ParamSpec("P")


def ending_with(call: Callable[P, None], on_bug: OnBug) -> Callable[P, None]:
    """The same callback; what it raises goes to on_bug. The event loop would log it and go on."""

    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            call(*args, **kwargs)
        except Exception as bug:
            log.exception("worker.crashed", taken_in=[type(each).__name__ for each in args])
            on_bug(bug)

    return guarded


async def until_bug(work: Awaitable[None], on_bug: OnBug) -> None:
    """Do it; what it raises goes to on_bug."""
    try:
        await work
    except Exception as bug:
        log.exception("worker.crashed")
        on_bug(bug)
