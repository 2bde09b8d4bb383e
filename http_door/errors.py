"""The one place where our errors become HTTP statuses with OpenAI's error objects."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec

from pdserve.errors import Code, InvalidRequest, Overloaded, PdserveError, UnknownModel
from pdserve.request import Chat, GenerateRequest
from pdserve.sampling import SamplingParams

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
_FIELD = re.compile(r"(?:number of chat )?([a-z_]+)(\[\d+\])?(?= |'s )")
# What a field of ours is called over HTTP.
_NAMES = {
    "prompt": "prompt", "text": "prompt", "token_ids": "prompt", "tokens": "tokens",
    "include_stop": "include_stop_str_in_output", "keep_special_tokens": "skip_special_tokens",
    "extra_json": "messages", "tools_json": "tools", "template_kwargs_json": "chat_template_kwargs",
    "choices": "structured_outputs", "regex": "structured_outputs", "grammar": "structured_outputs",
    "json_schema": "response_format",
}  # fmt: skip
_SAME_NAMES = {
    each.name for record in (GenerateRequest, SamplingParams, Chat) for each in dataclasses.fields(record)
} - {"input", "sampling", "structure", "resume"}


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


def reply_to(error: PdserveError, names: Mapping[str, str] = MappingProxyType({})) -> ErrorReply:
    """What a client is told of an error.

    names  of fields that its endpoint calls otherwise; a refusal of the endpoint's own has them already
    """
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
    param = _param_of(error)
    told = {
        "message": message,
        "type": kind,
        "param": (param if isinstance(error, HttpRefusal) else names.get(param, param)) or None,
        "code": _code_of(error, status),
    }
    return ErrorReply(status, {"error": told}, headers)


def _code_of(error: PdserveError, status: int) -> str | None:
    if isinstance(error, HttpRefusal):
        return error.name or None
    if isinstance(error, UnknownModel):
        return "model_not_found"
    if isinstance(error, InvalidRequest) and "window" in error.message.partition(" (")[0]:
        return "context_length_exceeded"
    return _CODES.get(status)


def _param_of(error: PdserveError) -> str:
    """The field that an InvalidRequest is about, if its sentence begins with one.

    Of one that a gateway was told, the message holds the values, too.
    """
    if isinstance(error, HttpRefusal):
        return error.param
    if isinstance(error, UnknownModel):
        return "model"
    found = _FIELD.match(error.message) if isinstance(error, InvalidRequest) else None
    if found is None:
        return ""
    if found[1] in _NAMES:
        return _NAMES[found[1]]
    return found[1] + (found[2] or "") if found[1] in _SAME_NAMES else ""
