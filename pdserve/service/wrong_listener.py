"""Calls that came to the wrong listener of a router are told which setting names the right one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from pdserve.errors import Incompatible

if TYPE_CHECKING:  # generic in the stubs only
    _Handler = grpc.GenericRpcHandler[Any, Any]
else:
    _Handler = grpc.GenericRpcHandler


class WrongListener(_Handler):
    """Refuses all calls of services that another listener of this process has; no address is told.

    settings  service → the setting that names its listener
    """

    def __init__(self, settings: Mapping[str, str]) -> None:
        self._settings = settings

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """The handler of a call; None if the service is none of these."""
        name = str(handler_call_details.method).strip("/").rpartition("/")[0]
        setting = self._settings.get(name)
        if setting is None:
            return None

        async def refuse(request_iterator: Any, context: Any) -> None:
            raise Incompatible("the router serves this at its other address", setting=setting)

        return grpc.stream_stream_rpc_method_handler(refuse)
