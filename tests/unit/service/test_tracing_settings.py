"""What an operator can get wrong about tracing, and what OTLP makes of a span."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from prometheus_client import CollectorRegistry

from pdserve.service.config import load
from pdserve.service.otlp import encode
from pdserve.service.settings import ConfigError
from pdserve.service.tracing import open_tracer, read_headers
from pdserve.service.tracing_config import TracingConfig
from pdserve.tracing import SpanEvent, SpanKind, Trace
from tests.support.virtual_clock import VirtualClock


@pytest.mark.parametrize(
    "endpoint", ["", "http://127.0.0.1:4317", "https://[::1]:4317/", "http://otel.monitoring:4317"]
)
def test_endpoints(endpoint: str) -> None:
    assert load(flags={"tracing.endpoint": endpoint}).tracing.endpoint == endpoint


@pytest.mark.parametrize(
    "endpoint",
    [
        "127.0.0.1:4317",
        "grpc://h:4317",
        "http://h",
        "http://h:4317/v1/traces",
        "http://u@h:4317",
        "http://h:99999",
        "http://[",
    ],
)
def test_what_is_no_endpoint(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"tracing.endpoint must be http://HOST:PORT or https://HOST:PORT"):
        load(flags={"tracing.endpoint": endpoint})


@pytest.mark.parametrize("ratio", ["-0.1", "1.1", "nan"])
def test_what_is_no_share(ratio: str) -> None:
    with pytest.raises(ConfigError, match=r"tracing.sample_ratio must be"):
        load(flags={"tracing.sample-ratio": ratio})


def test_headers(tmp_path: Path) -> None:
    file = tmp_path / "headers"
    file.write_text("# of the collector\n\nX-Api-Key:  a:b \nauthorization: Bearer c\n")
    assert read_headers(file) == {"x-api-key": "a:b", "authorization": "Bearer c"}


@pytest.mark.parametrize(
    "line", ["no colon", ": value", "name:", "a b: c", "grpc-timeout: 1", "name: \u00e4", "n\u00e4me: c"]
)
def test_what_is_no_header_names_its_line_and_not_its_value(line: str, tmp_path: Path) -> None:
    file = tmp_path / "headers"
    file.write_text(f"good: one\n{line}\n")
    with pytest.raises(ConfigError, match="line 2: not `name: value`") as refused:
        read_headers(file)
    assert "value" not in str(refused.value).replace("`name: value`", "")


def test_a_headers_file_that_is_not_there() -> None:
    config = TracingConfig(endpoint="http://127.0.0.1:4317", headers_file="/nowhere/headers")
    with (
        pytest.raises(ConfigError, match=r"tracing.headers_file: /nowhere/headers can't be read"),
        open_tracer(config, "s", "i", CollectorRegistry(), VirtualClock(), Random(1)),
    ):
        pass


def test_without_the_extra_the_error_says_what_to_install() -> None:
    program = """
import sys
sys.modules["opentelemetry"] = None
from random import Random
from prometheus_client import CollectorRegistry
from pdserve.clock import SystemClock
from pdserve.service.tracing import open_tracer
from pdserve.service.tracing_config import TracingConfig
for endpoint in ("", "http://127.0.0.1:4317"):
    with open_tracer(TracingConfig(endpoint=endpoint), "s", "i", CollectorRegistry(), SystemClock(), Random(1)):
        print("on")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "on\n" and "needs the extra otel: pip install 'pdserve[otel]'" in done.stderr


def test_a_span_as_otlp() -> None:
    place = Trace(0x0102, 0x03, Random(1))
    span = place.span(
        "attempt",
        2.0,
        3.5,
        kind=SpanKind.CLIENT,
        attributes={"text": "x", "yes": True, "count": 3, "share": 0.5, "list": ("a", "b")},
        events=[SpanEvent("granted", 2.5, {"n": 1})],
        links=[0x05],
        error="WorkerLost: gone",
    )
    first = Trace(0x0102, 0, Random(1)).span("request", 2.0, 3.0)
    message = encode([span, first], {"service.name": "pdserve-router"}, 10)
    [of_resource] = message.resource_spans
    assert of_resource.resource.attributes[0].value.string_value == "pdserve-router"
    made, root = of_resource.scope_spans[0].spans
    assert made.trace_id.hex() == "0" * 28 + "0102" and made.parent_span_id.hex() == "0" * 15 + "3"
    assert (made.start_time_unix_nano, made.end_time_unix_nano) == (2_000_000_010, 3_500_000_010)
    values = {each.key: each.value for each in made.attributes}
    assert values["yes"].bool_value and values["yes"].WhichOneof("value") == "bool_value"
    assert (values["count"].int_value, values["share"].double_value) == (3, 0.5)
    assert [each.string_value for each in values["list"].array_value.values] == ["a", "b"]
    assert (made.events[0].name, made.events[0].time_unix_nano) == ("granted", 2_500_000_010)
    assert made.links[0].span_id.hex() == "0" * 15 + "5" and made.links[0].trace_id == made.trace_id
    assert (made.status.code, made.status.message, made.kind) == (2, "WorkerLost: gone", 3)
    assert root.parent_span_id == b"" and root.status.code == 0
