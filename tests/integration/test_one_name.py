"""One request is found by its id in the logs of all its processes, with its attempt and its client's trace."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import grpc.aio

from pdserve.client import AsyncClient
from pdserve.rpc.v1.inference_pb2_grpc import InferenceStub
from tests.support.asking import Question, at_rest
from tests.support.singles import Single, Singles
from tests.support.waiting import until

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


async def moves_on(address: str, request_id: str, killed: Single, next_one: Single) -> None:
    """A request whose decode worker is killed in mid-stream; at the next one it goes on, until its client leaves."""
    message = Question.draw(Random(request_id), 300, 3_000).request.to_proto()
    message.request_id = request_id
    async with grpc.aio.insecure_channel(address) as channel:
        call = InferenceStub(channel).Generate(message, metadata=(("traceparent", TRACE),))
        for _ in range(3):
            await call.read()
        killed.kill()
        next_one.start()
        await next_one.ready()
        text = next_one.log_tail
        await until("tokens of the second attempt", lambda: _read_one(call, next_one), told=text)
        call.cancel()


async def _read_one(call: Any, worker: Single) -> bool:
    """The next event; whether this worker has decoded any by then."""
    await call.read()
    return await worker.metric("pdserve_decode_tokens_total") > 0


async def test_all_logs_tell_of_one_request(tmp_path: Path) -> None:
    with Singles(tmp_path, *FLAGS) as cluster:
        router = cluster.router("r0")
        for role, name in (("prefill", "p0"), ("decode", "d0")):
            cluster.worker(role, name, *FAKE)
        cluster.start()
        next_one = cluster.worker("decode", "d1", *FAKE)
        async with AsyncClient(router.address) as client:
            await at_rest(client, ["d0", "p0"], heartbeat_s=HEARTBEAT_S)
            await generate(router.address, "traced", ("traceparent", TRACE))
            await generate(router.address, "plain")
            await generate(router.address, "odd", ("traceparent", "00-nonsense"))
            await generate(router.address, "left", ("traceparent", TRACE), num_reads=3)
            await at_rest(client, ["d0", "p0"], heartbeat_s=HEARTBEAT_S)
            await moves_on(router.address, "moved", cluster.all["d0"], next_one)
            await at_rest(client, ["d1", "p0"], heartbeat_s=HEARTBEAT_S)
        logs = {name: lines_of(single.log) for name, single in cluster.all.items()}

    for name, lines in logs.items():
        for line in lines:
            if line["event"].startswith(NAMED):
                assert line.get("request_id"), (name, line)
                assert line["event"].startswith("request.") or line.get("attempt"), (name, line)
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

    moved = {
        name: [
            (line["event"].split(".")[1], line["attempt"])
            for line in lines
            if line.get("request_id") == "moved" and line["event"].startswith("attempt.")
        ]
        for name, lines in logs.items()
    }
    assert moved == {
        "r0": [("begun", 1), ("failed", 1), ("begun", 2)],
        "p0": [("begun", 1), ("ended", 1), ("begun", 2), ("ended", 2)],
        "d0": [("begun", 1)],  # it was killed
        "d1": [("begun", 2), ("ended", 2)],
    }
    (failed,) = [line for line in logs["r0"] if line["event"] == "attempt.failed"]
    assert (failed["choice"], failed["error"], failed["traceparent"]) == (0, "WorkerLost", TRACE)
