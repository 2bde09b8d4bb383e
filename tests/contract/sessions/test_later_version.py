"""A worker, or a router, of a later version: what isn't known here is skipped and counted, and the rest goes on."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from pdserve import messages as m
from pdserve.errors import Incompatible
from pdserve.messages import Down, Up
from pdserve.rpc import convert
from pdserve.rpc.v1 import session_pb2 as pb
from pdserve.rpc.v1.session_pb2_grpc import WorkersStub
from pdserve.service.later_version import Tolerant
from pdserve.service.peer_proof import WorkerProof
from pdserve.service.proven_call import open_proven
from pdserve.service.rpc import open_channel
from pdserve.session import Session
from pdserve.wire_version import FIRST, WIRE_VERSION, spoken
from tests.contract.sessions.wires import KEEPALIVE_S, WORKER, grpc_server
from tests.support.wire_corpus import lines

ADDED = b"\xc2\x3e\x02\x08\x01"  # field 1000: a message that holds 1
LATER = (WIRE_VERSION[0], WIRE_VERSION[1] + 1)
NOW = WIRE_VERSION


def added_to(kind: Any, octets: bytes) -> Any:
    """A message with a field that this version doesn't know."""
    return kind.FromString(octets + ADDED)


async def open_raw(address: str, method: str, *messages: Any) -> Any:
    """A worker that writes these messages as they stand; returns channel and call."""
    channel = open_channel(address, keepalive_s=KEEPALIVE_S, max_message_bytes=1 << 20)
    begin = getattr(WorkersStub(channel), method)
    proof = WorkerProof(WORKER, None, random.Random(3))
    call = await open_proven(lambda metadata: begin(metadata=metadata), proof, address, 20.0)
    for message in messages:
        await call.write(message)
    return channel, call


async def test_a_workers_session() -> None:
    counted: list[tuple[str, str]] = []
    received: asyncio.Future[tuple[Up, Up]] = asyncio.get_running_loop().create_future()

    async def on_session(session: Session[Down, Up]) -> None:
        received.set_result((await session.receive(), await session.receive()))

    async with (
        asyncio.timeout(60),
        asyncio.TaskGroup() as tasks,
        grpc_server(
            on_session, tasks, count_unknown=lambda channel, what: counted.append((channel, what))
        ) as address,
    ):
        beat = pb.Up(heartbeat=pb.Heartbeat(num_steps=7))
        channel, call = await open_raw(
            address,
            "Session",
            added_to(pb.Up, b""),
            added_to(pb.Up, beat.SerializeToString()),
            pb.Up(heartbeat=pb.Heartbeat(num_steps=8)),
        )
        assert await received == (m.Heartbeat(7, False), m.Heartbeat(8, False))
        assert counted == [("session", "kind")]
        call.cancel()
        await channel.close(None)


async def test_a_worker_of_1_1_opens_its_stream_of_cache_events_and_keeps_it() -> None:
    """What it says there is not read; refused, it would dial again each second and warn each time."""
    frozen = [line.octets for wire in ("opening", "cache") for line in lines() if line.wire == wire]
    beaten = asyncio.Event()

    async def on_session(session: Session[Down, Up]) -> None:
        assert await session.receive() == m.Heartbeat(7, False)
        beaten.set()

    async with (
        asyncio.timeout(60),
        asyncio.TaskGroup() as tasks,
        grpc_server(on_session, tasks) as address,
    ):
        old = [pb.Retired.FromString(octets) for octets in frozen]
        channel, call = await open_raw(address, "CacheEvents", *old)
        beat = pb.Up(heartbeat=pb.Heartbeat(num_steps=7))
        session_channel, session = await open_raw(address, "Session", beat)
        await beaten.wait()
        assert old[0].SerializeToString() == frozen[0] and not call.done()
        for each in (call, session):
            each.cancel()
        await channel.close(None)
        await session_channel.close(None)


@pytest.mark.parametrize(("wire", "counted"), [(LATER, 2), (NOW, 0), (None, 0)])
def test_fields_are_looked_for_where_the_other_side_is_later(
    wire: tuple[int, int] | None, counted: int
) -> None:
    """In the router's Welcome itself, and deep inside what follows."""
    found: list[tuple[str, str]] = []
    read: Tolerant[Down] = Tolerant(
        convert.down_from_proto, lambda channel, what: found.append((channel, what))
    )
    welcome = m.Welcome("r0", wire=wire)
    inner = added_to(pb.Welcome, convert.down_to_proto(welcome).welcome.SerializeToString())
    assert read(pb.Down(welcome=inner)) == welcome
    worker = added_to(pb.WorkerRef, pb.WorkerRef(id="d", epoch=pb.Epoch()).SerializeToString())
    assert read(pb.Down(unpair=pb.Unpair(decode_worker=worker))) is not None
    assert read(pb.Down(demand=pb.Demand(num_queued_tokens=1))) == m.Demand(1)
    assert found == [("session", "field")] * counted


def test_majors_must_be_equal_and_the_lower_minor_is_spoken() -> None:
    assert spoken(NOW, LATER) == spoken(LATER, NOW) == NOW
    assert spoken(NOW, FIRST) == spoken(NOW, None) == FIRST
    with pytest.raises(Incompatible, match=r"field=wire, ours=1.\d, theirs=2.0"):
        spoken(NOW, (2, 0))
