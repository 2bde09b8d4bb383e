"""Spans as OTLP writes them, and the call that takes them to a collector. Needs the extra `pdserve[otel]`.

Not OpenTelemetry's own exporter: it retries in sleeps, logs a line for each, and holds up whoever shuts it down.
docs/decisions/0021-tracing.md
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import urlsplit

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import TraceServiceStub
from opentelemetry.proto.common.v1 import common_pb2 as common
from opentelemetry.proto.resource.v1 import resource_pb2 as resource
from opentelemetry.proto.trace.v1 import trace_pb2 as trace

from pdserve import __version__
from pdserve.service.span_export import CollectorAway, CollectorRefuses
from pdserve.tracing import Attribute, SpanKind, TraceSpan

SCOPE = "pdserve"
EXPORT_S = 5.0

_KINDS = {
    SpanKind.INTERNAL: trace.Span.SPAN_KIND_INTERNAL,
    SpanKind.SERVER: trace.Span.SPAN_KIND_SERVER,
    SpanKind.CLIENT: trace.Span.SPAN_KIND_CLIENT,
}
# After which OTLP says that the same spans may be sent again.
_PASSES = {
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DATA_LOSS,
}


class OtlpCollector:
    """A `Collector` at an address. One thread sends; any may close.

    endpoint  http://HOST:PORT or https://HOST:PORT
    resource  who makes the spans
    """

    def __init__(self, endpoint: str, resource: Mapping[str, Attribute], headers: Mapping[str, str]) -> None:
        url = urlsplit(endpoint)
        options = [("grpc.enable_http_proxy", 0), ("grpc.max_reconnect_backoff_ms", 5_000)]
        if url.scheme == "https":
            self._channel = grpc.secure_channel(url.netloc, grpc.ssl_channel_credentials(), options)
        else:
            self._channel = grpc.insecure_channel(url.netloc, options)
        self._stub = TraceServiceStub(self._channel)
        self._resource = resource
        self._headers = tuple(headers.items())

    def send(self, spans: Sequence[TraceSpan], wall_offset_ns: int) -> int:
        """Returns how many of them it has rejected. Raises CollectorAway, CollectorRefuses."""
        request = encode(spans, self._resource, wall_offset_ns)
        try:
            answer = self._stub.Export(request, timeout=EXPORT_S, metadata=self._headers)
        except grpc.RpcError as error:
            code, details = error.code(), str(error.details())[:200]
            kind = CollectorAway if code in _PASSES else CollectorRefuses
            raise kind(f"{code.name}: {details}") from None
        except ValueError as error:  # the channel was closed meanwhile
            raise CollectorAway(str(error)) from None
        return int(answer.partial_success.rejected_spans)

    def close(self) -> None:
        """Ends a call in progress at once; idempotent."""
        self._channel.close()


def encode(
    spans: Iterable[TraceSpan], about: Mapping[str, Attribute], wall_offset_ns: int
) -> service.ExportTraceServiceRequest:
    """wall_offset_ns: what to add to a moment of the process's clock, in nanoseconds, to get nanoseconds since 1970."""

    def ns(at_s: float) -> int:
        return round(at_s * 1e9) + wall_offset_ns

    def of_span(span: TraceSpan) -> trace.Span:
        trace_id = span.trace_id.to_bytes(16, "big")
        status = trace.Status()
        if span.error:
            status = trace.Status(code=trace.Status.STATUS_CODE_ERROR, message=span.error)
        return trace.Span(
            trace_id=trace_id,
            span_id=span.span_id.to_bytes(8, "big"),
            parent_span_id=span.parent_id.to_bytes(8, "big") if span.parent_id else b"",
            name=span.name,
            kind=_KINDS[span.kind],
            start_time_unix_nano=ns(span.begin_s),
            end_time_unix_nano=ns(span.end_s),
            attributes=_attributes(span.attributes),
            events=[
                trace.Span.Event(
                    time_unix_nano=ns(event.at_s), name=event.name, attributes=_attributes(event.attributes)
                )
                for event in span.events
            ],
            links=[
                trace.Span.Link(trace_id=trace_id, span_id=link.to_bytes(8, "big")) for link in span.links
            ],
            status=status,
        )

    scope = common.InstrumentationScope(name=SCOPE, version=__version__)
    of_scope = trace.ScopeSpans(scope=scope, spans=map(of_span, spans))
    who = resource.Resource(attributes=_attributes(about))
    return service.ExportTraceServiceRequest(
        resource_spans=[trace.ResourceSpans(resource=who, scope_spans=[of_scope])]
    )


def _attributes(values: Mapping[str, Attribute]) -> list[common.KeyValue]:
    return [common.KeyValue(key=key, value=_value(value)) for key, value in values.items()]


def _value(value: Attribute) -> common.AnyValue:
    match value:
        case bool():
            return common.AnyValue(bool_value=value)
        case int():
            return common.AnyValue(int_value=value)
        case float():
            return common.AnyValue(double_value=value)
        case str():
            return common.AnyValue(string_value=value)
        case tuple():
            return common.AnyValue(array_value=common.ArrayValue(values=map(_value, value)))
