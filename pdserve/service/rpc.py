"""gRPC servers and channels as every process of the system makes them: keepalive, limits, health, reflection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pdserve.ids import Random
from pdserve.service.address import join_address, split_address
from pdserve.service.rpc_errors import ErrorInterceptor
from pdserve.service.settings import ConfigError
from pdserve.service.tls import ClientTls

INFERENCE = "pdserve.rpc.v1.Inference"
VLLM_ENGINE = "vllm.grpc.engine.VllmEngine"
WORKERS = "pdserve.rpc.v1.Workers"
ADMIN = "pdserve.rpc.v1.Admin"

PING_S = 1.0  # as often do clients of ours ping, if they aren't told otherwise
MAX_STREAMS = 16_384  # calls of one connection at a time
MAX_PENDING_CALLS = 131_072  # of all connections, about 15 KB each

EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # what a read returns at the end; the stubs don't know it


def keepalive_options(keepalive_s: float, answer_s: float | None = None) -> list[tuple[str, int]]:
    """Ping after keepalive_s without data, and give the answer answer_s; None = as long again.

    Without `ping_timeout_ms` a stopped peer is noticed after 60 s only, whatever keepalive_timeout_ms says.
    """
    answer_ms = _milliseconds(keepalive_s if answer_s is None else answer_s)
    return [
        ("grpc.keepalive_time_ms", _milliseconds(keepalive_s)),
        ("grpc.keepalive_timeout_ms", answer_ms),
        ("grpc.http2.ping_timeout_ms", answer_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def make_server(
    *,
    keepalive_s: float,
    answer_s: float | None = None,
    max_message_bytes: int,
    random: Random,
    gates: Sequence[grpc.aio.ServerInterceptor[Any, Any]] = (),
    max_streams: int = MAX_STREAMS,
    max_pending_calls: int = MAX_PENDING_CALLS,
) -> grpc.aio.Server:
    """A server without services yet; errors of its servicers, and of `gates`, are mapped by `ErrorInterceptor`.

    keepalive_s, answer_s  how long a peer may be quiet before it is pinged, and how long its answer may take
    max_pending_calls      that the event loop hasn't looked at; from half of it on gRPC turns some away
    """
    # Half of what our own clients and workers send, so that none of them is told "too many pings".
    least_ms = _milliseconds(min(keepalive_s, PING_S) / 2)
    options: list[tuple[str, Any]] = [
        *keepalive_options(keepalive_s, answer_s),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", least_ms),
        ("grpc.http2.min_ping_interval_without_data_ms", least_ms),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", -1),
        # Calls that nobody has looked at yet. gRPC's own answer to one too many is CANCELLED, by default from 1,000 on,
        # and ours can only be told by the loop. So a connection holds less of them than are too many: whatever it
        # sends, it never meets that bound, nor do several. "Overload protection" would count streams that are just
        # ending, of which a client knows nothing: what it sends then is refused, and ends UNAVAILABLE.
        ("grpc.max_concurrent_streams", max_streams),
        ("grpc.http.overload_protection", 0),
        ("grpc.server.max_pending_requests", max_pending_calls),
        ("grpc.server.max_pending_requests_hard_limit", max_pending_calls),
        ("grpc.server_max_unrequested_time_in_server", 3600),
        ("grpc.so_reuseport", 0),  # a second server on the port must fail, not take half of the calls
    ]
    return grpc.aio.server(interceptors=[ErrorInterceptor(random), *gates], options=options)


def bind(
    server: grpc.aio.Server,
    address: str,
    key: str = "router.listen",
    credentials: grpc.ServerCredentials | None = None,
) -> str:
    """Listen on HOST:PORT (0 = a free port); returns the address with its real port.

    key          the setting that a refusal names
    credentials  of TLS; None = without
    Raises ConfigError.
    """
    host, _ = split_address(address)
    try:
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise ConfigError(
            f"{key}: can't listen on {address}: in use, or not an address of this host"
        ) from error
    return join_address(host, port)


def open_channel(
    target: str, *, keepalive_s: float, max_message_bytes: int = -1, tls: ClientTls | None = None
) -> grpc.aio.Channel:
    """A channel with a connection of its own; connects on the first call, again after at most 1 s.

    tls  None = without. Raises ConfigError for its files.
    """
    options: list[tuple[str, Any]] = [
        *keepalive_options(keepalive_s),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1000),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.enable_http_proxy", 0),
    ]
    if tls is None:
        return grpc.aio.insecure_channel(target, options=options)
    return grpc.aio.secure_channel(target, tls.credentials(), options=[*options, *tls.options()])


class Health:
    """The standard health service of a process, on all of its servers: "" is the process, names are services."""

    def __init__(self, *servers: grpc.aio.Server) -> None:
        self._servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]
        for server in servers:
            health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def serving(self, service: str) -> None:
        """From now on SERVING."""
        await self._servicer.set(service, health_pb2.HealthCheckResponse.SERVING)

    async def not_serving(self, service: str) -> None:
        """From now on NOT_SERVING."""
        await self._servicer.set(service, health_pb2.HealthCheckResponse.NOT_SERVING)

    async def drain(self) -> None:
        """NOT_SERVING for all services and for good; later changes are ignored."""
        await self._servicer.enter_graceful_shutdown()


def add_reflection(server: grpc.aio.Server, services: Sequence[str]) -> None:
    """Let grpcurl and the like find these services, health, and reflection itself."""
    names = [*services, health.SERVICE_NAME, reflection.SERVICE_NAME]
    reflection.enable_server_reflection(names, server)
