"""Logs, metrics, signals and drains of a process."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import signal
from collections.abc import Iterator

import pytest
import structlog
from prometheus_client import CollectorRegistry, generate_latest

from pdserve.block_messages import BlockCounts
from pdserve.errors import InvalidRequest
from pdserve.messages import Load
from pdserve.service.address import join_address, split_address
from pdserve.service.config import LogConfig
from pdserve.service.lifecycle import EXIT_INTERRUPTED, StopSignals
from pdserve.service.logs import set_up_logs
from pdserve.service.metrics import Total, WorkerMetrics


@pytest.fixture
def _logs_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level, config = root.handlers, root.level, structlog.get_config()
    yield
    root.handlers, root.level = handlers, level
    structlog.configure(**config)


@pytest.mark.usefixtures("_logs_as_before")
def test_json_logs_have_the_fields_of_the_process_and_the_context() -> None:
    out = io.StringIO()
    set_up_logs(LogConfig(level="info", format="json"), out, role="prefill", worker="p0")
    log = structlog.get_logger()
    with structlog.contextvars.bound_contextvars(request_id="r1"):
        log.info("kv.handed_off", num_blocks=12)
    log.debug("not.shown")
    logging.getLogger("grpc").error("from a library")
    first, second = [json.loads(line) for line in out.getvalue().splitlines()]
    assert first["event"] == "kv.handed_off"
    assert {"role": "prefill", "worker": "p0", "request_id": "r1", "num_blocks": 12}.items() <= first.items()
    assert first["level"] == "info"
    assert first["timestamp"].endswith("Z")
    assert (second["event"], second["role"]) == ("from a library", "prefill")


@pytest.mark.usefixtures("_logs_as_before")
@pytest.mark.parametrize("form", ["json", "console"])
def test_tracebacks_are_in_the_log(form: str) -> None:
    out = io.StringIO()
    set_up_logs(LogConfig(level="debug", format=form), out)
    try:
        raise KeyError("gone")
    except KeyError:
        structlog.get_logger().exception("thing.failed")
    assert "KeyError" in out.getvalue()
    assert "thing.failed" in out.getvalue()


def test_totals_become_counters() -> None:
    registry = CollectorRegistry()
    total = Total(registry, "things", "Things.", ("peer",))
    total.set(5, "a")
    total.set(7, "a")
    total.set_all({"a": 7, "b": 2})
    total.set(1, "a")  # its keeper started over
    assert registry.get_sample_value("things_total", {"peer": "a"}) == 8
    assert registry.get_sample_value("things_total", {"peer": "b"}) == 2


def test_worker_metrics_take_over_the_load() -> None:
    metrics = WorkerMetrics()
    load = Load(
        blocks=BlockCounts(1, 2, 3, 4, 5),
        num_running=7,
        num_waiting=8,
        num_queued_tokens=9,
        num_queued_short_tokens=0,
        chunk_tokens=512,
        num_cache_hit_tokens=10,
        num_cache_query_tokens=11,
        prefill_tokens_per_s=0.0,
        step_s=0.0,
        slowest_step_s=0.0,
        draining=True,
    )
    metrics.on_load(load)
    text = generate_latest(metrics.registry).decode()
    for state, count in zip(("free", "granted", "owned", "cached", "quarantined"), range(1, 6)):
        assert f'pdserve_kv_blocks{{state="{state}"}} {count}.0' in text
    assert "pdserve_cache_hit_tokens_total 10.0" in text
    assert "pdserve_draining 1.0" in text


def test_energy_that_nobody_can_tell_is_no_metric() -> None:
    metrics = WorkerMetrics()
    assert b"pdserve_energy" not in generate_latest(metrics.registry)
    metrics.set_energy(2.5, "prefill")
    metrics.set_energy(4.0, "prefill")
    name = "pdserve_energy_joules_total"
    assert metrics.registry.get_sample_value(name, {"phase": "prefill"}) == 4.0
    assert metrics.registry.get_sample_value(name, {"phase": "decode"}) is None


def test_two_workers_in_one_process_share_no_metric() -> None:
    WorkerMetrics().running.set(3)
    assert WorkerMetrics().registry.get_sample_value("pdserve_running_sequences") == 0


async def test_the_first_signal_asks_and_the_second_ends() -> None:
    ended: list[int] = []
    second = asyncio.Event()

    def end_now(code: int) -> None:
        ended.append(code)
        second.set()

    async with StopSignals(end_now) as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(20):
            await signals.wait()
        assert ended == []
        os.kill(os.getpid(), signal.SIGINT)
        async with asyncio.timeout(20):
            await second.wait()
    assert ended == [EXIT_INTERRUPTED]


@pytest.mark.parametrize("text", ["127.0.0.1:0", "[::1]:50051", "host:65535"])
def test_addresses_round_trip(text: str) -> None:
    assert join_address(*split_address(text)) == text


@pytest.mark.parametrize("text", ["", "host", ":1", "host:", "host:x", "::1:5", "h:65536", "h:-1", "h:٣"])
def test_bad_addresses_are_named(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"HOST:PORT|65535"):
        split_address(text)
