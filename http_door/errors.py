"""The one place where our errors become HTTP statuses with OpenAI's error objects."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import msgspec

from pdserve.errors import Code, InvalidRequest, Overloaded, PdserveError, UnknownModel

_STATUS = {
    Code.INVALID_ARGUMENT: 400,
    Code.UNAUTHENTICATED: 401,
    Code.PERMISSION_DENIED: 403,
    Code.NOT_FOUND: 404,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.CANCELLED: 499,  # has no name of its own; a library must not try it again
    Code.UNAVAILABLE: 503,
    Code.ABORTED: 503,
    Code.DEADLINE_EXCEEDED: 504,
}  # any other: 500
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}
_FIELD = re.compile(r"(?:number of chat )?([a-z_]+(?:\[\d+\])?)(?= |'s )")
# What a field of ours is called over HTTP.
_NAMES = {
    "text": "prompt", "token_ids": "prompt", "include_stop": "include_stop_str_in_output",
    "choices": "structured_outputs", "regex": "structured_outputs", "grammar": "structured_outputs",
    "json_schema": "response_format",
}  # fmt: skip


class HttpRefusal(PdserveError):
    """Something that only HTTP knows: an unknown path, a body too large, one that came too slowly.

    param  the field of the body that is wrong
    """

    code = Code.INVALID_ARGUMENT

    def __init__(
        self, status: int, message: str, *, param: str = "", code: str = "", **fields: object
    ) -> None:
        super().__init__(message, **fields)
        self.status = status
        self.param = param
        self.name = code


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """content: the error object. headers: of the answer, if it isn't part of a stream."""

    status: int
    content: dict[str, Any]
    headers: dict[str, str]

    @property
    def body(self) -> bytes:
        """As JSON."""
        return msgspec.json.encode(self.content)


def refused_field(name: str, message: str, **fields: object) -> HttpRefusal:
    """A field of the body that can't be had."""
    return HttpRefusal(400, message, param=name, code="", **fields)


def reply_to(error: PdserveError) -> ErrorReply:
    """What a client is told of an error."""
    status = error.status if isinstance(error, HttpRefusal) else _STATUS.get(error.code, 500)
    if isinstance(error, InvalidRequest) and error.too_large == "message":
        status = 413
    headers = {}
    message = str(error)
    if isinstance(error, Overloaded):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
        rest = {name: value for name, value in error.fields.items() if name != "retry_after_s"}
        message = str(PdserveError(error.message, **rest))
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    told = {
        "message": message,
        "type": kind,
        "param": _param_of(error) or None,
        "code": _code_of(error, status),
    }
    return ErrorReply(status, {"error": told}, headers)


def _code_of(error: PdserveError, status: int) -> str | None:
    if isinstance(error, HttpRefusal):
        return error.name or None
    if isinstance(error, UnknownModel):
        return "model_not_found"
    if "window" in error.message and status == 400:
        return "context_length_exceeded"
    return _CODES.get(status)


def _param_of(error: PdserveError) -> str:
    """The field that an InvalidRequest is about: the first word of its sentence."""
    if isinstance(error, HttpRefusal):
        return error.param
    if isinstance(error, UnknownModel):
        return "model"
    found = _FIELD.match(error.message) if isinstance(error, InvalidRequest) else None
    return "" if found is None else _NAMES.get(found[1], found[1])
