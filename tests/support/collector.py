"""A collector of traces that is not ours (rotel, of the package index), and a server that keeps what it passes on.

router, workers ── OTLP ─► rotel ── OTLP, as it understood it ─► KeptSpans
"""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc

from deploy.local.ports import PortReservations
from tests.support.waiting import until


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenSpan:
    """One span as the collector passed it on; moments in seconds since 1970."""

    service: str
    instance: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    begin_s: float
    end_s: float
    attributes: dict[str, Any]
    events: tuple[tuple[str, float], ...]
    links: tuple[str, ...]
    is_error: bool
    message: str

    @property
    def took_s(self) -> float:
        return self.end_s - self.begin_s


class KeptSpans(trace_service_pb2_grpc.TraceServiceServicer):  # type: ignore[misc]
    """A server of OTLP in this process."""

    def __init__(self) -> None:
        self.spans: list[SeenSpan] = []
        self._server = grpc.server(ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        for of_resource in request.resource_spans:
            who = _values(of_resource.resource.attributes)
            for of_scope in of_resource.scope_spans:
                self.spans += [_seen(who, span) for span in of_scope.spans]
        return pb.ExportTraceServiceResponse()

    def close(self) -> None:
        self._server.stop(None).wait()

    async def trace(self, trace_id: str, num_spans: int) -> list[SeenSpan]:
        """All spans of a trace, once there are so many, by their begin."""

        async def found() -> list[SeenSpan] | None:
            spans = [span for span in self.spans if span.trace_id == trace_id]
            return sorted(spans, key=lambda span: span.begin_s) if len(spans) >= num_spans else None

        def told() -> str:
            return "\n".join(f"{span.trace_id} {span.service} {span.name}" for span in self.spans)

        return await until(f"{num_spans} spans of {trace_id}", found, told=told)


def rotel_program() -> Path | None:
    """None: not installed, or it has no build for this platform."""
    spec = importlib.util.find_spec("rotel")
    program = Path(spec.origin or "").parent / "rotel-agent" if spec else None
    return program if program is not None and program.exists() else None


@contextmanager
def running_rotel(program: Path, folder: Path, to_port: int) -> Iterator[str]:
    """Its OTLP endpoint; what it takes goes on to 127.0.0.1:to_port. Ended by pid."""
    ports = PortReservations()
    grpc_port, http_port = (ports.reserve("127.0.0.1", 0) for _ in range(2))
    ports.close()
    with (folder / "rotel.log").open("wb") as log:
        process = subprocess.Popen(
            [
                program, "start",
                "--otlp-grpc-endpoint", f"127.0.0.1:{grpc_port}",
                "--otlp-http-endpoint", f"127.0.0.1:{http_port}",
                "--pid-file", folder / "rotel.pid",
                "--exporter", "otlp",
                "--otlp-exporter-endpoint", f"http://127.0.0.1:{to_port}",
                "--otlp-exporter-compression", "none",
                "--disable-batching",
            ],
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            yield f"http://127.0.0.1:{grpc_port}"
        finally:
            process.kill()
            process.wait()


def _seen(who: dict[str, Any], span: Any) -> SeenSpan:
    return SeenSpan(
        service=who["service.name"],
        instance=who["service.instance.id"],
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        kind=span.kind,
        begin_s=span.start_time_unix_nano / 1e9,
        end_s=span.end_time_unix_nano / 1e9,
        attributes=_values(span.attributes),
        events=tuple((event.name, event.time_unix_nano / 1e9) for event in span.events),
        links=tuple(link.span_id.hex() for link in span.links),
        is_error=span.status.code == 2,
        message=span.status.message,
    )


def _values(attributes: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for attribute in attributes:
        kind = attribute.value.WhichOneof("value")
        value = getattr(attribute.value, kind)
        found[attribute.key] = (
            [each.string_value for each in value.values] if kind == "array_value" else value
        )
    return found
