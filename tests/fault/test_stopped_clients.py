"""A client that stands still for a while, and one that never comes back: real processes, real signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from pdserve.client import AsyncClient
from tests.support.asking import at_rest
from tests.support.singles import Single, Singles
from tests.support.waiting import until

HEARTBEAT_S = 0.1
KEEPALIVE_S = 0.2
NUM_TOKENS = 4_000
# Plain gRPC: no resume, no options. It says "five" at the fifth event, then what came and how it ended.
CLIENT = """
import sys, grpc
from pdserve.rpc.v1 import inference_pb2 as pb, inference_pb2_grpc as rpc
asked = pb.GenerateRequest(text="Once upon a time", sampling=pb.SamplingParams(
    max_tokens=int(sys.argv[2]), temperature=0, ignore_eos=True))
num_events = num_tokens = 0
try:
    for event in rpc.InferenceStub(grpc.insecure_channel(sys.argv[1])).Generate(asked, timeout=200):
        num_events += 1
        num_tokens += len(event.tokens.token_ids)
        if num_events == 5:
            print("five", flush=True)
    print("OK", num_tokens, flush=True)
except grpc.RpcError as error:
    print(error.code().name, error.details(), flush=True)
"""


async def beats(router: Single, number: int) -> None:
    """So many more heartbeats of the router."""
    name = "pdserve_loop_lag_seconds_count"
    first = await router.metric(name)

    async def look() -> bool:
        return await router.metric(name) >= first + number

    await until(f"{number} heartbeats", look)


async def test_a_client_that_stands_still_for_ten_of_the_workers_keepalives_keeps_its_stream(
    tmp_path: Path,
) -> None:
    flags = ("--timeouts.heartbeat-s", f"{HEARTBEAT_S}", "--timeouts.keepalive-s", f"{KEEPALIVE_S}")
    with Singles(tmp_path, *flags) as cluster:
        router = cluster.router("r0")
        cluster.worker("prefill", "p0", "--engine", "fake")
        cluster.worker("decode", "d0", "--engine", "fake")
        cluster.start()
        async with AsyncClient(router.address) as client:
            await at_rest(client, ["d0", "p0"], heartbeat_s=HEARTBEAT_S)
        child = subprocess.Popen(
            (sys.executable, "-c", CLIENT, router.address, f"{NUM_TOKENS}"), stdout=subprocess.PIPE, text=True
        )
        try:
            assert child.stdout is not None
            assert child.stdout.readline().strip() == "five"
            os.kill(child.pid, signal.SIGSTOP)
            await beats(router, round(10 * KEEPALIVE_S / HEARTBEAT_S))
            os.kill(child.pid, signal.SIGCONT)
            assert child.stdout.readline().strip() == f"OK {NUM_TOKENS}"
        finally:
            child.kill()
            child.wait()
            if child.stdout is not None:
                child.stdout.close()
