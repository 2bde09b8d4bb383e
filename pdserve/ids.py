"""Identities: worker epochs, and the one source of random numbers from which ids and seeds are drawn."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Protocol

from pdserve.errors import InvalidRequest


class Random(Protocol):
    """The port for randomness: `random.Random` with a seed in simulations, the system's source in production.

    May be called from the owner it was given to only.
    """

    def getrandbits(self, k: int, /) -> int: ...
    def random(self) -> float: ...


def system_random() -> Random:
    """The operating system's source."""
    return random.SystemRandom()


@dataclass(frozen=True, slots=True, order=True)
class Epoch:
    """The incarnation of a worker process: wall-clock start in ns, then 64 random bits; compared as a pair."""

    start_ns: int
    nonce: int

    def __str__(self) -> str:
        return f"{self.start_ns:x}.{self.nonce:016x}"


@dataclass(frozen=True, slots=True, order=True)
class WorkerRef:
    """One incarnation of one worker."""

    id: str
    epoch: Epoch

    def check(self) -> None:
        """Of one that came from another process: raises InvalidRequest."""
        if not self.id:
            raise InvalidRequest("a worker must be named by id and epoch", field="id")

    def __str__(self) -> str:
        return f"{self.id}@{self.epoch}"


@dataclass(frozen=True, slots=True)
class AttemptName:
    """Whose work something is, for logs: the same in every process that has a part in it.

    choice, attempt  from 0, and from 1
    traceparent      of the client's call, as W3C Trace Context writes it; "" = it had none. Of one that is traced, of
                     the router's own span above it
    """

    request_id: str = ""
    choice: int = 0
    attempt: int = 0
    traceparent: str = ""

    @property
    def logged(self) -> dict[str, str | int]:
        """The fields of a log line."""
        fields: dict[str, str | int] = {
            "request_id": self.request_id,
            "choice": self.choice,
            "attempt": self.attempt,
        }
        return fields | {"traceparent": self.traceparent} if self.traceparent else fields


NAMELESS = AttemptName()


def draw_id64(source: Random) -> int:
    """A non-zero 64-bit id (handles, lease ids, nonces): 0 means "none" on the wire."""
    while True:
        value = source.getrandbits(64)
        if value:
            return value


def draw_text_id(source: Random, prefix: str) -> str:
    """A readable id, 64 random bits in hex behind a prefix."""
    return f"{prefix}-{source.getrandbits(64):016x}"
