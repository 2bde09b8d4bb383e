"""A prefill worker dials what a router of its cluster says, and nothing that a stranger says."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from pdserve import messages as m
from pdserve.client import AsyncClient
from pdserve.errors import PdserveError, Unauthenticated
from pdserve.ids import Epoch, WorkerRef
from pdserve.messages import Down, Up
from pdserve.session import Session
from tests.contract.sessions.wires import grpc_server, make_dialer
from tests.support.asking import at_rest
from tests.support.singles import Singles
from tests.support.waiting import until

HEARTBEAT_S = 0.1
FAKE = ("--engine", "fake", "--engine.num-blocks", "256", "--timeouts.heartbeat-s", f"{HEARTBEAT_S}")
SECRET, OTHER = b"one that only this cluster knows\n", b"another one, of some other people\n"


@pytest.mark.parametrize("secret", [None, OTHER, SECRET], ids=["no secret", "another", "the cluster's"])
async def test_a_router_must_prove_itself_before_its_addresses_are_dialled(
    tmp_path: Path, secret: bytes | None
) -> None:
    """The last row shows that a stranger's order would be followed if it counted."""
    file, routers = tmp_path / "secret", tmp_path / "routers"
    file.write_bytes(SECRET)
    file.chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as trap:
        trap.setblocking(False)
        order = m.Pair(WorkerRef("stranger-9", Epoch(9, 9)), (f"tcp://127.0.0.1:{trap.getsockname()[1]}",))

        async def stranger(session: Session[Down, Up]) -> None:
            """Waits for nothing: the order lies in the connection before the worker has said a word."""
            session.send(m.Welcome("stranger"))
            session.send(order)
            try:
                while True:
                    await session.receive()
            except PdserveError:
                return

        async with (
            asyncio.timeout(120),
            asyncio.TaskGroup() as tasks,
            grpc_server(stranger, tasks, secret=secret and secret.strip()) as address,
        ):
            with Singles(tmp_path, "--cluster.secret-file", f"{file}") as cluster:
                router = cluster.router("r0", "--timeouts.heartbeat-s", f"{HEARTBEAT_S}")
                routers.write_text(f"{router.operators}\n{address}\n")
                prefill = cluster.worker("prefill", "p0", *FAKE, routers_file=routers)
                cluster.worker("decode", "d0", *FAKE)
                cluster.start()
                async with AsyncClient(router.address) as client:
                    await at_rest(client, ["d0", "p0"], heartbeat_s=HEARTBEAT_S)
                if secret == SECRET:
                    await until("it dials", lambda: was_dialled(trap), told=cluster.log_tails)
                    return
                await until("the stranger was tried and refused", lambda: refused(prefill.log, address))
                assert not await was_dialled(trap)
                assert "stranger-9" not in prefill.log.read_text()


async def refused(log: Path, address: str) -> bool:
    lines = log.read_text().splitlines()
    return any("router.refuses_this_worker" in line and address in line for line in lines)


async def was_dialled(trap: socket.socket) -> bool:
    try:
        sock, _ = trap.accept()
    except BlockingIOError:
        return False
    sock.close()
    return True


async def test_a_worker_must_prove_itself_before_its_addresses_are_told(tmp_path: Path) -> None:
    """Hello and all: nobody is told of a decode worker that isn't one of the cluster."""
    file = tmp_path / "secret"
    file.write_bytes(SECRET)
    file.chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as trap, Singles(tmp_path) as cluster:
        trap.setblocking(False)
        inside = ("--cluster.secret-file", f"{file}")
        router = cluster.router("r0", "--timeouts.heartbeat-s", f"{HEARTBEAT_S}", *inside)
        prefill = cluster.worker("prefill", "p0", *FAKE, *inside)
        cluster.worker("decode", "d0", *FAKE, *inside)
        stranger = cluster.worker("decode", "stranger-9", *FAKE)
        cluster.start()
        async with AsyncClient(router.address) as client:
            await at_rest(client, ["d0", "p0"], heartbeat_s=HEARTBEAT_S)
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            for secret in (None, OTHER.strip()):
                with pytest.raises(Unauthenticated):
                    await make_dialer(tasks, secret).dial(router.operators)
        await until("the stranger is told", lambda: refused(stranger.log, router.operators))
        async with AsyncClient(router.address) as client:
            await at_rest(client, ["d0", "p0"], heartbeat_s=HEARTBEAT_S)
        assert "stranger-9" not in prefill.log.read_text()
        assert await stranger.metric("pdserve_links") == 0
