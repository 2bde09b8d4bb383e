"""The settings of tracing, a table of the configuration (config.py); docs/tracing.md says what is traced."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from pdserve.fields import setting
from pdserve.service.settings import check_fields


def _wanted_of(value: object) -> str:
    """What an endpoint must be; "" = it is that, or empty."""
    if value == "":
        return ""
    try:
        parts = urlsplit(str(value))
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port
        good = good and not (parts.path.strip("/") or parts.query or parts.username)
    except ValueError:
        good = False
    return "" if good else "http://HOST:PORT or https://HOST:PORT"


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingConfig:
    """Spans of requests, for a collector of OpenTelemetry (extra pdserve[otel])."""

    endpoint: str = setting(
        "",
        "collector that takes OTLP over gRPC: http://HOST:4317, or https:// with TLS; empty = nothing is traced",
        verify=_wanted_of,
    )
    sample_ratio: float = setting(
        1.0,
        "share of the requests without a traceparent of their own that are traced; of others their client decides",
        least=0.0,
        most=1.0,
    )
    headers_file: str = setting(
        "", "file with a line `name: value` for each header that the collector wants, such as its key"
    )
    max_queued_spans: int = setting(
        4096, "spans that may wait for a collector that is slow or away; later ones are dropped", least=64
    )

    def __post_init__(self) -> None:
        check_fields("tracing", self)
