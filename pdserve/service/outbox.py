"""What a session has still to send: bounded, and merging so that a short stall costs little.

Tokens of one sequence join into one message and are never dropped; of load, heartbeats, progress, credits and
demand only the newest is kept. The order of all other messages, and of the messages of one handle, stays.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar, cast

from pdserve.messages import (
    Credits,
    Demand,
    DownHeartbeat,
    Heartbeat,
    Load,
    Progress,
    PromptLogprobs,
    StartDecode,
    StartPrefill,
    Step,
    StepTokens,
)
from pdserve.sampling import TokenLogprobs

M = TypeVar("M")

DEFAULT_LIMIT = 1 << 18  # at 3,000 tokens/s a reader is 80 s behind then; about 10 MB


class Outbox(Generic[M]):
    """Event-loop thread only.

    limit  messages and the tokens in them that may wait
    """

    def __init__(self, limit: int = DEFAULT_LIMIT) -> None:
        self._limit = limit
        self._slots: deque[_Slot] = deque()
        self._newest: dict[tuple[str, int], _Slot] = {}
        self._open: _Slot | None = None  # the last queued Step: later ones may join it
        self._behind_open: set[int] = set()  # handles with a message behind the open Step
        self._size = 0

    @property
    def size(self) -> int:
        """Messages and tokens that wait."""
        return self._size

    def __bool__(self) -> bool:
        return self._size > 0

    def put(self, message: M) -> bool:
        """Queue a message. False if it doesn't fit: the reader is too slow, and the message is not queued."""
        size = _size(message)
        if self._size + size > self._limit:
            return False
        if isinstance(message, Step):
            self._put_step(message, size)
            return True
        slot = _Slot(message, size)
        kind = _newest_kind(message)
        if kind is not None:
            older = self._newest.get(kind)
            if older is not None:
                self._size -= older.size
                older.message = None
            self._newest[kind] = slot
        elif self._open is not None:
            handle = getattr(message, "handle", None)
            if handle is not None:
                self._behind_open.add(handle)
        self._append(slot)
        return True

    def take(self) -> M | None:
        """The next message, or None."""
        while self._slots:
            slot = self._slots.popleft()
            if slot is self._open:
                self._open = None
                self._behind_open.clear()
            message = slot.message if slot.joined is None else slot.joined.build()
            if message is None:  # a newer one of its kind stands further back
                continue
            self._size -= slot.size
            kind = _newest_kind(message)
            if kind is not None:
                del self._newest[kind]
            return cast(M, message)  # a Step is only joined out of Steps that were put
        return None

    def clear(self) -> None:
        """Forget everything."""
        self._slots.clear()
        self._newest.clear()
        self._open = None
        self._behind_open.clear()
        self._size = 0

    def _put_step(self, step: Step, size: int) -> None:
        slot = self._open
        if slot is None or any(each.handle in self._behind_open for each in step.sequences):
            self._open = _Slot(step, size)
            self._behind_open.clear()
            self._append(self._open)
            return
        if slot.joined is None:
            slot.joined = _JoinedStep()
            slot.joined.add(cast(Step, slot.message))
        slot.joined.add(step)
        slot.size += size - 1
        self._size += size - 1

    def _append(self, slot: _Slot) -> None:
        self._slots.append(slot)
        self._size += slot.size


class _Slot:
    """One place in the queue; its message may be taken out, or joined with later ones, while it waits."""

    __slots__ = ("joined", "message", "size")

    def __init__(self, message: object, size: int) -> None:
        self.message: object | None = message
        self.size = size
        self.joined: _JoinedStep | None = None


class _JoinedStep:
    """Steps that become one: a run of tokens for each handle, a further run where they don't adjoin."""

    def __init__(self) -> None:
        self._runs: dict[int, list[_Run]] = {}

    def add(self, step: Step) -> None:
        for each in step.sequences:
            runs = self._runs.setdefault(each.handle, [])
            if runs and runs[-1].adjoins(each):
                runs[-1].token_ids.extend(each.token_ids)
                runs[-1].logprobs.extend(each.logprobs)
                runs[-1].energy_j = each.energy_j
            else:
                runs.append(_Run(each))

    def build(self) -> Step:
        return Step(
            tuple(
                StepTokens(
                    handle, run.first_position, tuple(run.token_ids), tuple(run.logprobs), run.energy_j
                )
                for handle, runs in self._runs.items()
                for run in runs
            )
        )


class _Run:
    __slots__ = ("energy_j", "first_position", "logprobs", "token_ids")

    def __init__(self, tokens: StepTokens) -> None:
        self.first_position = tokens.first_position
        self.token_ids: list[int] = list(tokens.token_ids)
        self.logprobs: list[TokenLogprobs] = list(tokens.logprobs)
        self.energy_j = tokens.energy_j

    def adjoins(self, later: StepTokens) -> bool:
        same_kind = bool(self.logprobs) == bool(later.logprobs)
        return same_kind and later.first_position == self.first_position + len(self.token_ids)


def _size(message: object) -> int:
    if isinstance(message, Step):
        return 1 + sum(len(each.token_ids) for each in message.sequences)
    if isinstance(message, StartPrefill | StartDecode):
        return 1 + len(message.token_ids)
    if isinstance(message, PromptLogprobs):
        return 1 + len(message.tokens)
    return 1


def _newest_kind(message: object) -> tuple[str, int] | None:
    """What only the newest of is kept, or None."""
    if isinstance(message, Load | Heartbeat | Credits | Demand | DownHeartbeat):
        return (type(message).__name__, 0)
    if isinstance(message, Progress):
        return ("Progress", message.handle)
    return None
