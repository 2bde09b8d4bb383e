"""Work that would hold up the loop and must not be done by the engine: somewhere else, one call after another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

T = TypeVar("T")


class Background(Protocol):
    """Called on the loop."""

    def __call__(self, call: Callable[[], T], done: Callable[[T], None], /) -> None:
        """done: called on the loop with what `call` returned; `call` must not raise."""
        ...


class ThreadBackground:
    """On a thread of its own, which lives from the first call to the end of the process."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)

    def __call__(self, call: Callable[[], T], done: Callable[[T], None], /) -> None:
        def tell(future: asyncio.Future[T]) -> None:
            if not future.cancelled():  # else the loop ends
                done(future.result())

        asyncio.get_running_loop().run_in_executor(self._pool, call).add_done_callback(tell)
