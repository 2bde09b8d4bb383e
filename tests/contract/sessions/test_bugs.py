"""A bug in a session is no lost connection: whoever reads the session gets it, at the end where it is."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pdserve.errors import PdserveError, WorkerLost
from pdserve.messages import Down, Up
from pdserve.session import Session
from tests.contract.sessions.wires import grpc_server, grpc_wire, make_dialer

NO_MESSAGE: Any = object()  # nothing that could be written


@pytest.mark.parametrize("at", ["worker", "router"])
async def test_the_end_that_has_the_bug_reads_it_and_the_other_a_lost_session(at: str) -> None:
    async with grpc_wire() as wire, asyncio.timeout(20):
        one, other = (wire.worker, wire.router) if at == "worker" else (wire.router, wire.worker)
        one.send(NO_MESSAGE)
        with pytest.raises(Exception) as bug:
            await one.receive()
        assert not isinstance(bug.value, PdserveError)
        with pytest.raises(WorkerLost):
            await other.receive()


async def test_a_router_counts_its_own_and_lives() -> None:
    crashes: list[None] = []

    async def on_session(session: Session[Down, Up]) -> None:
        raise KeyError("a bug")

    async with (
        asyncio.timeout(20),
        asyncio.TaskGroup() as tasks,
        grpc_server(on_session, tasks, count_crash=lambda: crashes.append(None)) as address,
    ):
        for number in (1, 2):
            session = await make_dialer(tasks).dial(address)
            with pytest.raises(WorkerLost):
                await session.receive()
            assert len(crashes) == number
