"""One request is found by its id in the logs of all three processes, with its attempt and its client's trace."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import grpc.aio

from pdserve.client import AsyncClient
from pdserve.rpc.v1.inference_pb2_grpc import InferenceStub
from tests.support.asking import Question, at_rest
from tests.support.singles import Singles

HEARTBEAT_S = 0.1
FLAGS = ("--timeouts.heartbeat-s", f"{HEARTBEAT_S}", "--log.level", "debug")
FAKE = ("--engine", "fake", "--engine.num-blocks", "512")
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NAMED = ("attempt.", "lease.", "grant.", "sequence.", "piece.", "request.")
"""Events about something that has a name."""


def lines_of(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


async def generate(address: str, request_id: str, *metadata: tuple[str, str], num_reads: int = 0) -> None:
    """To its end; or, num_reads given, until the client hangs up after so many events."""
    message = Question.draw(Random(request_id), 300, 40 if not num_reads else 3_000).request.to_proto()
    message.request_id = request_id
    async with grpc.aio.insecure_channel(address) as channel:
        call = InferenceStub(channel).Generate(message, metadata=metadata)
        if not num_reads:
            async for _ in call:
                pass
        for _ in range(num_reads):
            await call.read()
        call.cancel()


async def test_three_logs_tell_of_one_request(tmp_path: Path) -> None:
    with Singles(tmp_path, *FLAGS) as cluster:
        router = cluster.router("r0")
        for role, name in (("prefill", "p0"), ("decode", "d0")):
            cluster.worker(role, name, *FAKE)
        cluster.start()
        async with AsyncClient(router.address) as client:
            await at_rest(client, ["d0", "p0"], heartbeat_s=HEARTBEAT_S)
            await generate(router.address, "traced", ("traceparent", TRACE))
            await generate(router.address, "plain")
            await generate(router.address, "odd", ("traceparent", "00-nonsense"))
            await generate(router.address, "left", ("traceparent", TRACE), num_reads=3)
            await at_rest(client, ["d0", "p0"], heartbeat_s=HEARTBEAT_S)
        logs = {name: lines_of(single.log) for name, single in cluster.all.items()}

    for name, lines in logs.items():
        for line in lines:
            if line["event"].startswith(NAMED):
                assert line.get("request_id"), (name, line)
    for request_id, trace, how in (
        ("traced", TRACE, "length"),
        ("plain", None, "length"),
        ("odd", None, "length"),
        ("left", TRACE, "RequestCancelled"),
    ):
        for name, ended in (("p0", "handed_off"), ("d0", how)):
            told = [line for line in logs[name] if line.get("request_id") == request_id]
            assert [line["event"] for line in told] == ["attempt.begun", "attempt.ended"], (name, told)
            assert told[-1]["how"] == ended
            assert {(line["attempt"], line["choice"], line.get("traceparent")) for line in told} == {
                (1, 0, trace)
            }
        told = [line for line in logs["r0"] if line.get("request_id") == request_id]
        assert [line["event"] for line in told] == ["attempt.begun", "request.finished"]
        assert {line.get("traceparent") for line in told} == {trace}
        handles = {
            line["handle"]
            for lines in logs.values()
            for line in lines
            if line.get("request_id") == request_id and line["event"].startswith("attempt.")
        }
        assert len(handles) == 1
    assert [line["traceparent"] for line in logs["r0"] if line["event"] == "traceparent.ignored"] == [
        "00-nonsense"
    ]
