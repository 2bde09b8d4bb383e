"""The one place where our errors become gRPC statuses, and where statuses become errors again."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import structlog
from google.protobuf.message import DecodeError

from pdserve import errors
from pdserve.errors import Code, Failure, PdserveError, Unauthenticated
from pdserve.ids import Random, draw_text_id

ERROR_KEY = "pdserve-error"  # trailing metadata: the class, so that a client raises the same one
RETRY_AFTER_KEY = "retry-after-ms"
MAX_DETAIL_CHARACTERS = (
    1000  # trailers are HTTP/2 headers, 8 KiB in all, and other scripts are percent-encoded
)
_REFUSED = "Connection refused"  # gRPC's own words, within many others

log = structlog.get_logger()

if TYPE_CHECKING:  # generic in the stubs only
    _Interceptor = grpc.aio.ServerInterceptor[Any, Any]
else:
    _Interceptor = grpc.aio.ServerInterceptor


def status_of(error: PdserveError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]:
    """Code, details and trailing metadata of an error."""
    trailers = [(ERROR_KEY, type(error).__name__)]
    details = str(error)
    if isinstance(error, errors.Overloaded):
        trailers.append((RETRY_AFTER_KEY, str(round(error.retry_after_s * 1000))))
        rest = {name: value for name, value in error.fields.items() if name != "retry_after_s"}
        details = str(PdserveError(error.message, **rest))
    return grpc.StatusCode[error.code.value], details[:MAX_DETAIL_CHARACTERS], tuple(trailers)


def error_of(error: grpc.aio.AioRpcError, target: str) -> PdserveError:
    """What the status of a failed call means to its caller.

    A server of ours names the class; without a name the status was made by a gRPC library on the way.
    """
    metadata: Any = error.trailing_metadata() or ()
    trailers: dict[str, Any] = dict(metadata)
    details = error.details() or error.code().name
    name = trailers.get(ERROR_KEY)
    if isinstance(name, str):
        return named_error(name, details, _milliseconds(trailers.get(RETRY_AFTER_KEY)))
    match error.code():
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return errors.DeadlineExceeded("the deadline has passed", target=target)
        case grpc.StatusCode.UNAUTHENTICATED:
            return Unauthenticated(details, target=target)
        case grpc.StatusCode.UNIMPLEMENTED:
            return errors.Incompatible("the server doesn't know this call", target=target, details=details)
        case (
            grpc.StatusCode.RESOURCE_EXHAUSTED
            | grpc.StatusCode.INVALID_ARGUMENT
            | grpc.StatusCode.OUT_OF_RANGE
        ):
            return errors.InvalidRequest("gRPC refused the message", target=target, details=details)
        case _ if _REFUSED in details:
            return ServerLost("nothing listens there: is `pdserve up` running?", target=target)
        case _:
            return ServerLost("the server can't be reached", target=target, details=details)


def named_error(name: str, details: str, retry_after_ms: int) -> PdserveError:
    """The error that a server of ours names. retry_after_ms: of one that has it."""
    fields = {}
    if name == errors.Overloaded.__name__:
        fields["retry_after_s"] = str(retry_after_ms / 1000)
    return errors.from_failure(Failure(name, details, fields))


class ServerLost(PdserveError):
    """The connection to a server failed or broke before the server said how the call ended."""

    code = Code.UNAVAILABLE


def _milliseconds(value: Any) -> int:
    return int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else 1000


def reading(behaviour: Callable[..., Any], deserializer: Callable[[bytes], Any] | None) -> Callable[..., Any]:
    """A behaviour that takes a message's bytes, for one that takes the message.

    gRPC itself would end a call whose message can't be read UNKNOWN; this raises InvalidRequest.
    """
    if deserializer is None:
        return behaviour
    read = deserializer

    def call(raw: bytes, context: Any) -> Any:
        return behaviour(parsed(raw, read), context)

    return call


def parsed(raw: bytes, deserializer: Callable[[bytes], Any]) -> Any:
    """A message. Raises InvalidRequest."""
    try:
        return deserializer(raw)
    except DecodeError:
        raise errors.InvalidRequest("the message is none of this call's", num_bytes=len(raw)) from None


class ErrorInterceptor(_Interceptor):
    """Ends every call of a server that raised: ours with its own status, any other as INTERNAL with a short id.

    The traceback of an unknown one goes to the log under that id, never to the client.
    """

    def __init__(self, random: Random) -> None:
        self._random = random

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        method = str(handler_call_details.method)
        for kind, factory in _FACTORIES.items():
            behaviour = getattr(handler, kind)
            if behaviour is not None:
                deserializer = handler.request_deserializer
                if not handler.request_streaming:
                    behaviour, deserializer = reading(behaviour, deserializer), None
                wrapped = (
                    self._stream(behaviour, method) if "_stream" in kind else self._unary(behaviour, method)
                )
                return factory(wrapped, deserializer, handler.response_serializer)
        return handler

    def _unary(self, behaviour: Callable[..., Any], method: str) -> Callable[..., Any]:
        async def call(request: Any, context: Any) -> Any:
            try:
                return await behaviour(request, context)
            except Exception as error:  # the server's outermost frame
                await self._end(error, context, method)

        return call

    def _stream(self, behaviour: Callable[..., Any], method: str) -> Callable[..., Any]:
        # Not a generator: one that hangs in a write when its call is cancelled would end when it is collected.
        async def call(request: Any, context: Any) -> None:
            try:
                outcome = behaviour(request, context)
                if hasattr(outcome, "__aiter__"):
                    async with contextlib.aclosing(outcome):
                        async for response in outcome:
                            await context.write(response)
                else:  # a coroutine that writes through its context
                    await outcome
            except Exception as error:  # the server's outermost frame
                await self._end(error, context, method)

        return call

    async def _end(self, error: Exception, context: Any, method: str) -> None:
        if isinstance(error, grpc.aio.AbortError):
            raise error
        found: BaseException = error
        if isinstance(error, ExceptionGroup):
            found = errors.primary(error)
        if isinstance(found, PdserveError):
            code, details, trailers = status_of(found)
            if found.code is Code.INTERNAL:
                log.error(
                    "rpc.failed", method=method, error=type(found).__name__, details=details, exc_info=found
                )
            await context.abort(code, details, trailers)
        name = draw_text_id(self._random, "error")
        log.error("rpc.failed", method=method, error_id=name, exc_info=error)
        await context.abort(
            grpc.StatusCode.INTERNAL, f"internal error, in the server's log as {name}", _INTERNAL
        )


_INTERNAL: Iterable[tuple[str, str]] = ((ERROR_KEY, errors.InvariantViolated.__name__),)
_FACTORIES: dict[str, Callable[..., Any]] = {
    "unary_unary": grpc.unary_unary_rpc_method_handler,
    "unary_stream": grpc.unary_stream_rpc_method_handler,
    "stream_unary": grpc.stream_unary_rpc_method_handler,
    "stream_stream": grpc.stream_stream_rpc_method_handler,
}
