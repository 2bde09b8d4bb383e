"""The trace that a client's call belongs to: the header `traceparent` of W3C Trace Context, as gRPC metadata."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import structlog

log = structlog.get_logger()

_MAX_CHARACTERS = 256  # later versions may be longer than the 55 of version 00
_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(-[!-~]*)?")


def traceparent_of(metadata: Iterable[tuple[str, Any]] | None) -> str:
    """The one that was sent; "" for none, or one that can't be: a client's trace is no reason to refuse its request."""
    sent = [value for key, value in metadata or () if key == "traceparent"]
    if not sent:
        return ""
    if len(sent) == 1 and isinstance(sent[0], str) and _is_valid(sent[0]):
        return sent[0]
    log.debug("traceparent.ignored", traceparent=str(sent[0])[:64], num_sent=len(sent))
    return ""


def _is_valid(text: str) -> bool:
    found = _FORM.fullmatch(text) if len(text) <= _MAX_CHARACTERS else None
    if found is None:
        return False
    version, trace_id, parent_id, rest = found.groups()
    return (
        version != "ff"
        and bool(trace_id.strip("0") and parent_id.strip("0"))
        and (version != "00" or not rest)
    )
