"""How one of many requests of a call ended, as GenerateMany writes it: what a call of its own has as its status."""

from __future__ import annotations

from pdserve.errors import InvariantViolated, PdserveError
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.service.rpc_errors import ERROR_KEY, RETRY_AFTER_KEY, named_error, status_of


def stream_end(error: PdserveError | None) -> pb.StreamEnd:
    """error: None = well."""
    if error is None:
        return pb.StreamEnd()
    code, details, trailers = status_of(error)
    told = dict(trailers)
    return pb.StreamEnd(
        code=code.value[0],
        details=details,
        error=told[ERROR_KEY],
        retry_after_ms=int(told.get(RETRY_AFTER_KEY, 0)),
    )


def error_of_end(end: pb.StreamEnd) -> PdserveError | None:
    """None: it ended well."""
    if not end.code:
        return None
    return named_error(end.error or InvariantViolated.__name__, end.details, end.retry_after_ms)
