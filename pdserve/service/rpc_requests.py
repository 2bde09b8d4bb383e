"""Requests of the gRPC services are read here: their size is compared before anything is made of them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import grpc
import grpc.aio

from pdserve.errors import InvalidRequest, PdserveError, too_large
from pdserve.rpc.wire_parts import Fields, check_parts, message_fields
from pdserve.service.receiving import Receiving
from pdserve.service.rpc import EOF
from pdserve.service.rpc_errors import parsed
from pdserve.steps import Steps

T = TypeVar("T")
READ_AT_ONCE_BYTES = 16_384  # less is read sooner than a thread is woken

if TYPE_CHECKING:  # generic in the stubs only
    _Interceptor = grpc.aio.ServerInterceptor[Any, Any]
else:
    _Interceptor = grpc.aio.ServerInterceptor


class Reading(Protocol):
    """Where large messages are read."""

    async def run(self, steps: Steps[T], *, user: str, num_bytes: int) -> T: ...


class RequestReader(_Interceptor):
    """Reads the request of every call that has just one, and those of some that have many; other streams of requests
    have their own readers.

    max_bytes   the largest message
    asker_of    whose turn it takes to read a call's message, by its context
    on_refused  told of each message that was refused
    receiving   where messages come in, but for those of calls with many: such calls are few
    many        methods with many requests that are read here
    """

    def __init__(
        self,
        max_bytes: int,
        reading: Reading,
        asker_of: Callable[[Any], str],
        on_refused: Callable[[PdserveError], None],
        receiving: Receiving,
        many: Collection[str] = (),
    ) -> None:
        self._max_bytes = max_bytes
        self._reading = reading
        self._asker_of = asker_of
        self._on_refused = on_refused
        self._receiving = receiving
        self._many = many

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        parse = handler.request_deserializer
        if handler_call_details.method in self._many:
            each = self._each(handler.stream_stream, parse)
            return grpc.stream_stream_rpc_method_handler(each, None, handler.response_serializer)
        if handler.request_streaming:
            return handler
        if handler.response_streaming:
            stream = self._stream(handler.unary_stream, parse)
            return grpc.stream_stream_rpc_method_handler(stream, None, handler.response_serializer)
        unary = self._unary(handler.unary_unary, parse)
        return grpc.stream_unary_rpc_method_handler(unary, None, handler.response_serializer)

    def _unary(self, behaviour: Callable[..., Any], parse: Callable[[bytes], Any]) -> Callable[..., Any]:
        async def call(_requests: Any, context: Any) -> Any:
            return await behaviour(await self._read(parse, context), context)

        return call

    def _stream(self, behaviour: Callable[..., Any], parse: Callable[[bytes], Any]) -> Callable[..., Any]:
        async def call(_requests: Any, context: Any) -> None:
            outcome = behaviour(await self._read(parse, context), context)
            if hasattr(outcome, "__aiter__"):
                async with aclosing(outcome):
                    async for response in outcome:
                        await context.write(response)
            else:
                await outcome

        return call

    def _each(self, behaviour: Callable[..., Any], parse: Callable[[bytes], Any]) -> Callable[..., Any]:
        async def messages(context: Any) -> AsyncGenerator[Any, None]:
            while (raw := await context.read()) is not EOF:
                yield await self._parsed(raw, parse, context)

        async def call(_requests: Any, context: Any) -> None:
            async with aclosing(messages(context)) as requests:
                await behaviour(requests, context)

        return call

    async def _read(self, parse: Callable[[bytes], Any], context: Any) -> Any:
        return await self._parsed(
            await self._receiving.take(context.read, self._asker_of(context)), parse, context
        )

    async def _parsed(self, raw: Any, parse: Callable[[bytes], Any], context: Any) -> Any:
        try:
            if raw is EOF:
                raise InvalidRequest("the call has no message")
            if len(raw) > self._max_bytes:
                raise too_large(
                    "message", "the message is too large", limit_bytes=self._max_bytes, value=len(raw)
                )
            if len(raw) <= READ_AT_ONCE_BYTES:
                return parsed(raw, parse)
            return await self._reading.run(
                _read_steps(raw, parse), user=self._asker_of(context), num_bytes=len(raw)
            )
        except PdserveError as error:
            self._on_refused(error)
            raise


def _read_steps(raw: bytes, parse: Callable[[bytes], Any]) -> Steps[Any]:
    yield from check_parts(raw, _fields_of(parse))
    return parsed(raw, parse)


def _fields_of(parse: Any) -> Fields:
    """parse: FromString of a message class."""
    return message_fields(parse.__self__.DESCRIPTOR)
