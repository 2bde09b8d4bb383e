"""The one error taxonomy: who must act, as a class, a gRPC code and a message between processes.

A servicer raises these; `pdserve.service` maps them to gRPC once, at the border. Between router and
workers an error travels as `Failure(error, message, fields)` and is raised again as the same class.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from pdserve.decimals import as_written

DEFAULT_RETRY_AFTER_S = 1.0


class Code(Enum):
    """gRPC status codes by name, so that this module needs no grpc."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    NOT_FOUND = "NOT_FOUND"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    CANCELLED = "CANCELLED"
    UNAVAILABLE = "UNAVAILABLE"
    ABORTED = "ABORTED"
    DATA_LOSS = "DATA_LOSS"
    FAILED_PRECONDITION = "FAILED_PRECONDITION"
    INTERNAL = "INTERNAL"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    PERMISSION_DENIED = "PERMISSION_DENIED"


_CLASSES: dict[str, type[PdserveError]] = {}


class PdserveError(Exception):
    """Base of the taxonomy: a constant sentence and the values that belong to it.

    `counts_as_attempt` tells the router whether an attempt that ended so uses up one of `max_attempts`.
    """

    code: Code = Code.INTERNAL
    replayable: bool = False
    counts_as_attempt: bool = False

    def __init__(self, message: str, **fields: object) -> None:
        super().__init__(message)
        self.message = message
        self.fields = fields

    def __init_subclass__(cls) -> None:
        _CLASSES[cls.__name__] = cls

    def __str__(self) -> str:
        if not self.fields:
            return self.message
        return f"{self.message} ({', '.join(f'{name}={_printable(value)}' for name, value in self.fields.items())})"


class InvalidRequest(PdserveError):
    """The caller must change the request."""

    code = Code.INVALID_ARGUMENT
    too_large: str = ""  # what of it, if it was refused because of its size before it was read


def too_large(what: str, message: str, **fields: object) -> InvalidRequest:
    """What is refused because of its size before it is read; these are counted by `what`."""
    error = InvalidRequest(message, **fields)
    error.too_large = what
    return error


class Unauthenticated(PdserveError):
    """The other side hasn't shown who it is: by an API key, or by proving the cluster secret."""

    code = Code.UNAUTHENTICATED


class PermissionDenied(PdserveError):
    """It is known who the caller is, and that it may not do this."""

    code = Code.PERMISSION_DENIED


class UnknownModel(PdserveError):
    """The caller named a model that is not served here."""

    code = Code.NOT_FOUND


class UnknownRequest(PdserveError):
    """No request of that id runs at this router."""

    code = Code.NOT_FOUND


class UnknownWorker(PdserveError):
    """No worker of that id has joined this router."""

    code = Code.NOT_FOUND


class Overloaded(PdserveError):
    """No room now; the caller may come back in `retry_after_s`. Never a reason to eject a worker."""

    code = Code.RESOURCE_EXHAUSTED
    replayable = True

    def __init__(
        self, message: str, *, retry_after_s: float = DEFAULT_RETRY_AFTER_S, **fields: object
    ) -> None:
        super().__init__(message, retry_after_s=retry_after_s, **fields)
        self.retry_after_s = float(retry_after_s)


class DeadlineExceeded(PdserveError):
    """The client's deadline has passed."""

    code = Code.DEADLINE_EXCEEDED


class RequestCancelled(PdserveError):
    """The client went away or asked to stop."""

    code = Code.CANCELLED


class WorkerLost(PdserveError):
    """A worker, its session or its link is gone, or a phase made no progress in its time."""

    code = Code.UNAVAILABLE
    replayable = True
    counts_as_attempt = True


class LinkLost(WorkerLost):
    """A decode worker's link to a prefill worker has ended.

    generation  of that link; 0 = there was none
    """

    def __init__(self, message: str, *, generation: int = 0, **fields: object) -> None:
        super().__init__(message, generation=generation, **fields)

    @property
    def generation(self) -> int:
        """Of the link; 0 if it isn't known, or what came from another process is no number."""
        text = str(self.fields.get("generation", ""))
        return int(text) if text.isascii() and text.isdigit() and len(text) <= 20 else 0


class NoWorker(PdserveError):
    """No worker of a role joined in `worker_wait_s`."""

    code = Code.UNAVAILABLE


class Draining(PdserveError):
    """The worker or router takes no new work and gave back what it had."""

    code = Code.UNAVAILABLE
    replayable = True


class HandedBack(PdserveError):
    """A preempted sequence too long to recompute on a decode worker: replay it through a prefill worker."""

    code = Code.UNAVAILABLE
    replayable = True


class Revoked(PdserveError):
    """A grant was taken back for older sequences; nobody's fault."""

    code = Code.ABORTED
    replayable = True


class Stale(PdserveError):
    """It belongs to another epoch, attempt, lease or generation."""

    code = Code.ABORTED
    replayable = True
    counts_as_attempt = True


class StepFailed(PdserveError):
    """The engine step that the sequence was in raised; the attempt carries a strike more."""

    code = Code.UNAVAILABLE
    replayable = True
    counts_as_attempt = True


class KvCorrupt(PdserveError):
    """KV bytes arrived with a wrong checksum, twice."""

    code = Code.DATA_LOSS
    replayable = True
    counts_as_attempt = True


class Incompatible(PdserveError):
    """Two sides don't fit: the message names the field and both values; the operator must act."""

    code = Code.FAILED_PRECONDITION


class InvariantViolated(PdserveError):
    """A bug of ours."""

    code = Code.INTERNAL


class RowFailed(PdserveError):
    """One sequence of a batch can't go on (NaN logits, sampler, bad index); never replayed."""

    code = Code.INTERNAL


@dataclass(frozen=True, slots=True)
class Failure:
    """An error as it travels between processes: class name, sentence, values as text."""

    error: str
    message: str
    fields: Mapping[str, str] = field(default_factory=dict)

    def check(self) -> None:
        """Of one that came from another process: raises InvalidRequest for what no error of ours can be."""
        if not self.error:
            raise InvalidRequest("a failure must name its class", field="error", text=self.message)
        if "message" in self.fields or "self" in self.fields:
            raise InvalidRequest("a failure's field has a reserved name", field="fields", error=self.error)
        retry_after_s = self.fields.get("retry_after_s", "0")
        if not _is_seconds(retry_after_s):
            raise InvalidRequest("want finite seconds, 0 or more", field="retry_after_s", value=retry_after_s)


def to_failure(error: PdserveError) -> Failure:
    """The message form of an error."""
    return Failure(
        type(error).__name__, error.message, {name: _text(value) for name, value in error.fields.items()}
    )


def from_failure(failure: Failure) -> PdserveError:
    """The error of a message, whatever its fields say; a class this version doesn't know becomes InvariantViolated
    and keeps its name. Never raises: what came from another process must not end the reader."""
    cls = _CLASSES.get(failure.error, InvariantViolated)
    error = cls(failure.message)
    error.fields.update(failure.fields)
    if cls.__name__ != failure.error:
        error.fields["error"] = failure.error
    if isinstance(error, Overloaded):
        told = str(failure.fields.get("retry_after_s", ""))
        error.retry_after_s = float(told) if _is_seconds(told) else DEFAULT_RETRY_AFTER_S
        error.fields["retry_after_s"] = error.retry_after_s
    return error


def _is_seconds(text: str) -> bool:
    try:
        return 0 <= float(text) < math.inf
    except ValueError:
        return False


def primary(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one error of a group that a client should see: ours before others, the first before later ones."""
    leaves = list(_leaves(group))
    for leaf in leaves:
        if isinstance(leaf, PdserveError):
            return leaf
    return leaves[0]


def _printable(value: object) -> str:
    """One line, whatever a file or a client put into it: line ends and control characters are escaped."""
    text = _text(value)
    if text.isprintable():
        return text
    return "".join(
        [
            char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode()
            for char in text
        ]
    )


def _text(value: object) -> str:
    return as_written(value) if isinstance(value, float) else str(value)


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    found: list[BaseException] = []
    for error in group.exceptions:
        found.extend(_leaves(error) if isinstance(error, BaseExceptionGroup) else [error])
    return found
