"""Where computing goes that would hold up the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

T = TypeVar("T")


class Work(Protocol):
    """Where computing goes that would hold up the loop: a thread pool, or (under virtual time) right here."""

    async def run(self, call: Callable[[], T], /) -> T: ...


class InlineWork:
    """Does it at once."""

    async def run(self, call: Callable[[], T], /) -> T:
        return call()


class ThreadWork:
    """A few threads. Encoding, decoding and the grammar library release the interpreter while they work."""

    def __init__(self, num_threads: int = 2, name: str = "tokenize") -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=name)

    async def run(self, call: Callable[[], T], /) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)

    def close(self) -> None:
        """Let the threads go; what still runs there is not waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)
