"""Work in small steps: whoever runs it can stop between two of them, or let others go first."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")

Steps = Generator[None, None, T]
"""Yields between two steps, returns the result. A step takes some milliseconds."""


def at_once(call: Callable[[], T]) -> Steps[T]:
    """Of a call that is one step."""
    yield from ()
    return call()


def finish(steps: Steps[T]) -> T:
    """The result, without a pause."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
