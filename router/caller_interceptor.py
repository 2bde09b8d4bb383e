"""Whose API key a call of the public service has, and whether its limits allow it: before its message is read."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from pdserve.errors import PdserveError
from pdserve.service.rpc import INFERENCE, VLLM_ENGINE
from router.callers import Caller, Callers
from router.gate import GENERATES, TAKE_PLACES, refusal
from router.metrics import RouterMetrics

if TYPE_CHECKING:  # generic in the stubs only
    _Interceptor = grpc.aio.ServerInterceptor[Any, Any]
else:
    _Interceptor = grpc.aio.ServerInterceptor

_GUARDED = (f"/{INFERENCE}/", f"/{VLLM_ENGINE}/")
_OPEN = f"/{VLLM_ENGINE}/HealthCheck"

_CALLER: ContextVar[Caller] = ContextVar("caller")


def caller_of_call() -> Caller:
    """Whose call the current task serves."""
    return _CALLER.get()


def asker_of_call(context: Any, user: str = "") -> str:
    """Whose turn it is when the current task's call is read: the tenant's, else the user's, else the connection's."""
    caller = _CALLER.get(None)
    return ("" if caller is None else caller.tenant) or user or str(context.peer())


class CallerInterceptor(_Interceptor):
    """Event-loop thread only. Other services of the same server (health, reflection) are open to all, and so
    is a health check of vLLM's service."""

    def __init__(self, callers: Callers, metrics: RouterMetrics) -> None:
        self._callers = callers
        self._metrics = metrics

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        method = str(handler_call_details.method)
        if method.startswith(_GUARDED) and method != _OPEN:
            try:
                self._admit(method, handler_call_details.invocation_metadata)
            except PdserveError as error:
                self._metrics.count_call_refused(error, is_request=method in GENERATES)
                return refusal(error)
        return await continuation(handler_call_details)

    def _admit(self, method: str, metadata: Any) -> None:
        caller = self._callers.admit(metadata)
        _CALLER.set(caller)
        if method in GENERATES:
            caller.limits.begin()
            task = asyncio.current_task()
            assert task is not None, "a server's calls run in tasks"
            task.add_done_callback(lambda _: caller.limits.end())
        elif method in TAKE_PLACES:
            caller.limits.take_call()
