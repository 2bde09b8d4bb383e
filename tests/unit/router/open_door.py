"""A router's gRPC door in the test's own process, in front of a router that no worker has joined."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio

from pdserve.clock import SystemClock
from pdserve.rpc.v1 import inference_pb2_grpc
from pdserve.service.receiving import Receiving
from pdserve.service.rpc import bind, make_server
from pdserve.service.rpc_requests import RequestReader
from router.app import RouterApp
from router.caller_interceptor import CallerInterceptor, asker_of_call
from router.door import InferenceServicer
from router.gate import GENERATE_MANY, Gate
from router.many import IDLE_S, ManyCalls
from router.work import InlineWork
from tests.support.waiting import until
from tests.unit.router.scripted import config

MAX_MANY = 2


@asynccontextmanager
async def door(num_places: int, idle_s: float = IDLE_S) -> AsyncIterator[tuple[RouterApp, Any]]:
    """Every request waits in it, in one of the places."""
    clock, source = SystemClock(), random.Random(1)
    asked = config({"max_queued_requests": num_places})
    async with RouterApp(asked, clock, source, work=InlineWork()) as app:
        gate = Gate(app.admission, app.metrics, clock)
        receiving = Receiving(8, clock, app.metrics.receiving_refused.inc)
        reader = RequestReader(1 << 19, app.turns, asker_of_call, app.on_unread, receiving, (GENERATE_MANY,))
        gates = (CallerInterceptor(app.callers, app.metrics), gate, reader)
        server = make_server(keepalive_s=1.0, max_message_bytes=1 << 20, random=source, gates=gates)
        inference_pb2_grpc.add_InferenceServicer_to_server(
            InferenceServicer(app, gate, ManyCalls(app, gate, clock, MAX_MANY, idle_s)), server
        )
        address = bind(server, "127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(address) as channel:
            yield app, channel
        await server.stop(None)


def ended(app: RouterApp, status: str) -> float:
    return app.metrics.registry.get_sample_value("pdserve_requests_total", {"status": status}) or 0.0


async def places(app: RouterApp, number: int) -> None:
    async def look() -> bool:
        return app.admission.num_places == number

    await until(f"{number} places are taken", look)
