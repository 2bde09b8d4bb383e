"""What happened, line by line: log lines, faults and clients always; every message and frame when asked for.

Recording draws nothing and schedules nothing, so a seed runs the same with a full tape as with a quiet one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import xxhash

from pdserve.ids import Epoch, WorkerRef
from pdserve.messages import Granted, StartDecode
from tests.support.virtual_clock import VirtualClock

_LONG = 8  # items of a sequence that are written out
_BIG = 1 << 32  # larger numbers are ids


@dataclass(frozen=True, slots=True)
class Line:
    """One thing that happened. ids: handles and leases that it is about; about: a request's name, or ""."""

    at_s: float
    text: str
    ids: tuple[int, ...] = ()
    about: str = ""

    def __str__(self) -> str:
        return f"{self.at_s:10.6f} {self.text}"


class Tape:
    """The lines of one run. full: messages and frames too.

    prompts, leases  on a full tape: what each handle's prompt is, and which handle each lease belongs to
    """

    def __init__(self, clock: VirtualClock, *, full: bool) -> None:
        self.full = full
        self.prompts: dict[int, tuple[int, ...]] = {}
        self.leases: dict[int, int] = {}
        self.who = ""  # "d0: " during a turn of an owner of d0
        self.lines: list[Line] = []
        self._clock = clock
        self._begin_s = clock.now_s()

    def now_s(self) -> float:
        """Virtual seconds since the start."""
        return self._clock.now_s() - self._begin_s

    def tell(self, text: str, *, about: str = "", ids: tuple[int, ...] = ()) -> None:
        """One line."""
        self.lines.append(Line(self.now_s(), text, ids, about))

    def message(self, way: str, message: object) -> None:
        """A message or frame on its way; only on a full tape."""
        if self.full:
            if isinstance(message, StartDecode):
                self.prompts[message.handle] = message.token_ids[: message.num_prompt_tokens]
            elif isinstance(message, Granted) and message.lease_id:
                self.leases[message.lease_id] = message.handle
            self.lines.append(Line(self.now_s(), f"{way} {shown(message)}", tuple(ids_in(message))))

    def __str__(self) -> str:
        return "\n".join(str(line) for line in self.lines)

    @property
    def digest(self) -> str:
        """Equal for equal traces."""
        return xxhash.xxh3_128_hexdigest(str(self).encode())


def ids_in(message: object) -> Iterator[int]:
    """Handles and leases named in a message or frame."""
    for name in ("handle", "lease_id"):
        value = getattr(message, name, None)
        if isinstance(value, int) and value:
            yield value
    for each in getattr(message, "sequences", ()):
        yield each.handle


def shown(value: object) -> str:
    """A value in few words: ids in hex, long sequences by length and digest."""
    if isinstance(value, WorkerRef):
        return value.id
    if isinstance(value, Epoch | Enum) or value is None or isinstance(value, bool | float | str):
        return str(value)
    if isinstance(value, int):
        return f"{value:016x}" if value >= _BIG else str(value)
    if isinstance(value, bytes):
        return f"<{len(value)} bytes {xxhash.xxh3_64_hexdigest(value)}>"
    if isinstance(value, tuple | list):
        if len(value) > _LONG and all(isinstance(item, int) for item in value):
            return f"<{len(value)} items {xxhash.xxh3_64_hexdigest(repr(value).encode())}>"
        return "(" + ", ".join(shown(item) for item in value) + ")"
    if dataclasses.is_dataclass(value):
        fields = [
            f"{field.name}={shown(getattr(value, field.name))}"
            for field in dataclasses.fields(value)
            if getattr(value, field.name) != field.default
        ]
        return f"{type(value).__name__}({', '.join(fields)})"
    return str(value)
