"""The router as a process: what it says before any worker has joined, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from pdserve.client import AsyncClient
from pdserve.errors import Incompatible
from pdserve.ids import Epoch, WorkerRef
from pdserve.operator_client import OperatorClient
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.rpc.v1.inference_pb2_grpc import InferenceStub
from pdserve.service.grpc_session import GrpcDialer
from pdserve.service.lifecycle import EXIT_INTERRUPTED, EXIT_OK
from pdserve.service.rpc import INFERENCE, VLLM_ENGINE
from pdserve.tokenizer import Tokenizer

PATIENCE_S = 30.0
_CODE = """
import sys
from pdserve.service.config import load
from router.process import serve
assert "torch" not in sys.modules, "torch in the router"
raise SystemExit(serve(load(flags={
    "router.listen": "127.0.0.1:0", "metrics.listen": "127.0.0.1:0", "log.format": "json", "router.id": "r0",
    "timeouts.worker_wait_s": 0.2, "router.model": sys.argv[1], "router.drain_delay_s": float(sys.argv[2]),
})))
"""


@contextlib.contextmanager
def router(
    model: str = "", drain_delay_s: float = 0.0
) -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
    """A router process and what it said when it began to listen."""
    command = [sys.executable, "-c", _CODE, model, f"{drain_delay_s}"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if '"router.listening"' in line:
                yield process, json.loads(line)
                break
        else:
            pytest.fail("the router did not start")
    finally:
        process.kill()
        process.wait()


def test_a_router_without_workers_answers_and_drains() -> None:
    with router() as (process, said), grpc.insecure_channel(said["address"]) as channel:
        stub = InferenceStub(channel)
        health = health_pb2_grpc.HealthStub(channel)

        def state(service: str) -> object:
            request = health_pb2.HealthCheckRequest(service=service)
            return health.Check(request, timeout=PATIENCE_S, wait_for_ready=True).status

        assert state("") == health_pb2.HealthCheckResponse.SERVING
        assert state("pdserve.rpc.v1.Inference") == health_pb2.HealthCheckResponse.NOT_SERVING
        assert "pdserve.rpc.v1.Inference" in ProtoReflectionDescriptorDatabase(channel).get_services()

        with pytest.raises(urllib.error.HTTPError) as not_ready:
            urllib.request.urlopen(f"http://{said['metrics']}/readyz", timeout=PATIENCE_S)
        assert not_ready.value.code == 503 and b"no tokenizer" in not_ready.value.read()
        with urllib.request.urlopen(f"http://{said['metrics']}/metrics", timeout=PATIENCE_S) as metrics:
            assert b"pdserve_pairs_up 0.0" in metrics.read()

        status = stub.GetStatus(pb.GetStatusRequest(), timeout=PATIENCE_S)
        assert status.router_id == "r0" and not status.workers and status.queue.limit == 1024
        for request, code in (
            (pb.GenerateRequest(), grpc.StatusCode.INVALID_ARGUMENT),
            (
                pb.GenerateRequest(text="x", sampling=pb.SamplingParams(top_p=2)),
                grpc.StatusCode.INVALID_ARGUMENT,
            ),
            (pb.GenerateRequest(text="x"), grpc.StatusCode.UNAVAILABLE),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                list(stub.Generate(request, timeout=PATIENCE_S))
            assert refused.value.code() is code
        with urllib.request.urlopen(f"http://{said['metrics']}/metrics", timeout=PATIENCE_S) as metrics:
            assert b'pdserve_requests_total{status="INVALID_ARGUMENT"} 2.0' in metrics.read()
        with pytest.raises(grpc.RpcError) as unknown:
            stub.Abort(pb.AbortRequest(request_id="none"), timeout=PATIENCE_S)
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0


def test_a_router_with_a_tokenizer_of_its_own_is_ready_without_a_worker(tmp_path: Path) -> None:
    for name, content in Tokenizer.fake().files.items():
        (tmp_path / name).write_bytes(content)
    with router(str(tmp_path)) as (_, said), grpc.insecure_channel(said["address"]) as channel:
        with urllib.request.urlopen(f"http://{said['metrics']}/readyz", timeout=PATIENCE_S) as ready:
            assert ready.status == 200
        stub = InferenceStub(channel)
        answer = stub.Tokenize(pb.TokenizeRequest(text="hi"), timeout=PATIENCE_S)
        assert tuple(answer.token_ids) == tuple(b"hi")


def test_a_model_that_is_not_there_ends_the_start_in_words() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _CODE, "no-such-model", "0"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert ended.returncode != 0 and "no model 'no-such-model'" in ended.stderr


def test_a_router_that_was_asked_to_stop_serves_on_for_a_while(tmp_path: Path) -> None:
    """What leads clients to it must see first that it isn't ready."""
    for name, content in Tokenizer.fake().files.items():
        (tmp_path / name).write_bytes(content)
    with router(str(tmp_path), drain_delay_s=600.0) as (process, said):
        assert process.stderr is not None
        process.send_signal(signal.SIGTERM)
        assert any('"router.still_serving"' in line for line in process.stderr)
        with pytest.raises(urllib.error.HTTPError) as not_ready:
            urllib.request.urlopen(f"http://{said['metrics']}/readyz", timeout=PATIENCE_S)
        assert not_ready.value.code == 503 and b"asked to stop" in not_ready.value.read()
        with grpc.insecure_channel(said["address"]) as channel:  # a new connection
            answer = InferenceStub(channel).Tokenize(pb.TokenizeRequest(text="hi"), timeout=PATIENCE_S)
            assert tuple(answer.token_ids) == tuple(b"hi")
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == EXIT_INTERRUPTED
    with router(drain_delay_s=0.1) as (process, _):
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == EXIT_OK


async def test_clients_and_workers_have_an_address_each_and_are_told_so_at_the_other() -> None:
    with router() as (_, said):
        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
            dialer = GrpcDialer(
                WorkerRef("w0", Epoch(1, 1)),
                keepalive_s=1.0,
                connect_s=PATIENCE_S,
                max_message_bytes=1 << 20,
                secret=None,
                random=random.Random(1),
                tasks=tasks,
                count_unknown=lambda channel, what: None,
            )
            with pytest.raises(Incompatible, match=r"other address.*router\.workers_listen") as refused:
                await dialer.dial(said["address"])
            assert said["workers"] not in str(refused.value)
            async with OperatorClient(said["address"]) as operator, AsyncClient(said["workers"]) as client:
                with pytest.raises(Incompatible, match=r"other address.*router\.workers_listen"):
                    await operator.drain_worker("w0")
                with pytest.raises(Incompatible, match=r"other address.*router\.listen"):
                    await client.status()
            session = await dialer.dial(said["workers"])
            session.close("the test is over")
    services = {}
    with router() as (_, said):
        for door in ("address", "workers"):
            with grpc.insecure_channel(said[door]) as channel:
                services[door] = set(ProtoReflectionDescriptorDatabase(channel).get_services())
    assert services["address"] - services["workers"] == {INFERENCE, VLLM_ENGINE}
    assert services["workers"] - services["address"] == {"pdserve.rpc.v1.Workers", "pdserve.rpc.v1.Admin"}


def test_an_address_that_strangers_reach_is_refused_at_the_start() -> None:
    code = _CODE.replace('"router.listen": "127.0.0.1:0"', '"router.listen": "0.0.0.0:0"')
    ended = subprocess.run(
        [sys.executable, "-c", code, "", "0"], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert ended.returncode != 0 and "router.listen 0.0.0.0:0: strangers could reach it" in ended.stderr
