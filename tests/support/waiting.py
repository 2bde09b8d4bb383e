"""Waiting for what another process doesn't announce: a count in its metrics, a row in a router's status."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

LIMIT_S = 60.0
_PAUSE_S = 0.02


async def until(
    what: str,
    ask: Callable[[], Awaitable[T | None]],
    *,
    limit_s: float = LIMIT_S,
    told: Callable[[], str] = str,
) -> T:
    """Ask again and again until the answer is neither None nor False; return it.

    told  what to say besides when it never is: a log's end, for one
    Raises AssertionError after limit_s.
    """
    answer: T | None = None
    try:
        async with asyncio.timeout(limit_s):
            while not (answer := await ask()):
                await asyncio.sleep(_PAUSE_S)
    except TimeoutError:
        raise AssertionError(f"not in {limit_s:g} s: {what}; last answer {answer!r}\n{told()}") from None
    return answer
