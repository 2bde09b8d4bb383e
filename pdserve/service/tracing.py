"""The tracer of a process, as its settings want it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from prometheus_client import CollectorRegistry

from pdserve import __version__
from pdserve.clock import Clock
from pdserve.ids import Random
from pdserve.service.settings import ConfigError
from pdserve.service.span_export import SpanExport, SpanMetrics, SpanThread
from pdserve.service.tracing_config import TracingConfig
from pdserve.tracing import Tracer


@contextmanager
def open_tracer(
    config: TracingConfig,
    service: str,
    instance: str,
    registry: CollectorRegistry,
    clock: Clock,
    random: Random,
) -> Iterator[Tracer]:
    """Samples and exports while it is entered; samples nothing without tracing.endpoint.

    service, instance  what kind of process makes the spans, and which
    Raises ConfigError.
    """
    metrics = SpanMetrics(registry)
    if not config.endpoint:
        yield Tracer.off()
        return
    headers = read_headers(Path(config.headers_file)) if config.headers_file else {}
    try:
        from pdserve.service.otlp import OtlpCollector  # an extra
    except ImportError as error:
        raise ConfigError("tracing.endpoint needs the extra otel: pip install 'pdserve[otel]'") from error
    about = {"service.name": service, "service.instance.id": instance, "service.version": __version__}
    collector = OtlpCollector(config.endpoint, about, headers)
    export = SpanExport(collector, metrics, clock, config.max_queued_spans)
    thread = SpanThread(export, collector)
    try:
        yield Tracer(thread.put, random, config.sample_ratio)
    finally:
        thread.close()


def read_headers(file: Path) -> Mapping[str, str]:
    """`name: value`, a line each; empty lines and those that begin with # don't count. Raises ConfigError."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"tracing.headers_file: {file} can't be read: {error}") from None
    headers: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith("#"):
            continue
        name, colon, value = line.partition(":")
        name, value = name.strip().lower(), value.strip()
        if not colon or not _is_name(name) or not (value.isascii() and value.isprintable() and value):
            raise ConfigError(f"tracing.headers_file: {file}, line {number}: not `name: value`")
        headers[name] = value
    return headers


def _is_name(name: str) -> bool:
    """Of a header that gRPC lets through; those of its own are not for others."""
    return (
        name.replace("-", "").replace("_", "").isalnum() and name.isascii() and not name.startswith("grpc-")
    )
