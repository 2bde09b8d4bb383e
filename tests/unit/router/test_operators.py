"""What an operator may ask of a worker, and what is refused."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pdserve.clock import SystemClock
from pdserve.errors import InvalidRequest, PdserveError, Unauthenticated, UnknownWorker
from pdserve.messages import (
    Drain,
    Role,
    SetRole,
    StartDecode,
    Welcome,
)
from pdserve.operator_client import OperatorClient
from pdserve.rpc.v1.admin_pb2_grpc import add_AdminServicer_to_server
from pdserve.service.peer_proof import RouterGuard
from pdserve.service.rpc import bind, make_server
from pdserve.status import ScalingNote
from router.admin_door import AdminServicer
from router.app import RouterApp
from router.scaling_notes import MAX_WORDS
from router.work import InlineWork
from tests.support.memory_session import MemoryWire
from tests.unit.router.scripted import Cluster, config, hello, load, virtual

SECRET = b"s" * 32
LIMIT_S = 60.0


@virtual
async def test_a_worker_is_told_of_its_new_role_and_gets_no_more_work() -> None:
    async with Cluster() as cluster:
        p, d0 = await cluster.pair()
        d1 = await cluster.decode("d1")
        await cluster.link(p, d1)
        cluster.app.operators.set_role("d0", Role.PREFILL)
        assert (await d0.expect(SetRole)).role is Role.PREFILL
        client = cluster.generate("hello")
        await d1.expect(StartDecode)
        states = {worker.id: worker.state for worker in cluster.app.status().workers}
        assert states == {"p0": "up", "d0": "draining", "d1": "up"}
        d0.die()
        await cluster.settle()
        again = await cluster.join(hello("d0", Role.PREFILL, role_generation=1))
        await cluster.link(again, d1)
        roles = {worker.id: (worker.role, worker.state) for worker in cluster.app.status().workers}
        assert roles["d0"] == ("prefill", "up")
        client.generation.close()


@virtual
async def test_what_is_refused_names_the_worker_and_the_reason() -> None:
    async with Cluster() as cluster:
        _, d0 = await cluster.pair()
        operators = cluster.app.operators
        with pytest.raises(UnknownWorker, match=r"d7.*known=p0, d0"):
            operators.set_role("d7", Role.PREFILL)
        with pytest.raises(UnknownWorker):
            operators.drain("")
        with pytest.raises(InvalidRequest, match=r"has this role already.*decode"):
            operators.set_role("d0", Role.DECODE)
        last = r"last worker of its role.*worker=d0.*role=decode"
        with pytest.raises(InvalidRequest, match=last):
            operators.set_role("d0", Role.BOTH)
        with pytest.raises(InvalidRequest, match=last):
            operators.drain("d0")
        await cluster.settle()
        assert not d0.got(SetRole) and not d0.got(Drain)
        operators.drain("d0", force=True)
        await d0.expect(Drain)


@virtual
async def test_one_that_drains_already_leaves_nobody_behind_as_the_last() -> None:
    async with Cluster() as cluster:
        _, d0 = await cluster.pair()
        d1 = await cluster.decode("d1")
        cluster.app.operators.drain("d0")
        with pytest.raises(InvalidRequest, match="last worker of its role"):
            cluster.app.operators.drain("d1")
        cluster.app.operators.set_role("d0", Role.PREFILL)  # it goes anyhow
        assert (await d0.expect(SetRole)).role is Role.PREFILL and not d1.got(Drain)


@asynccontextmanager
async def admin_door(secret: bytes | None) -> AsyncIterator[tuple[str, MemoryWire]]:
    """A router's admin service on loopback, and the wire of its one worker, d0."""
    source = random.Random(1)
    app = RouterApp(config(), SystemClock(), source, work=InlineWork())
    wire = MemoryWire(asyncio.get_running_loop().call_later, lambda: 0.0, worker="d0")
    server = make_server(keepalive_s=1.0, max_message_bytes=1 << 20, random=source)
    guard = RouterGuard("r0", secret, SystemClock(), source)
    add_AdminServicer_to_server(AdminServicer(app, guard, source), server)
    address = bind(server, "127.0.0.1:0")
    await server.start()
    async with asyncio.timeout(LIMIT_S), app, asyncio.TaskGroup() as tasks:
        tasks.create_task(app.attach_session(wire.router_end))
        wire.worker_end.send(hello("d0", Role.DECODE))
        wire.worker_end.send(load())
        assert isinstance(await wire.worker_end.receive(), Welcome)
        yield address, wire
        wire.worker_end.close("test over")
        await server.stop(None)


async def test_the_service_needs_no_secret_where_the_cluster_has_none() -> None:
    async with admin_door(None) as (address, wire), OperatorClient(address, secret=SECRET) as strict:
        async with OperatorClient(address) as client:
            with pytest.raises(UnknownWorker, match="d7"):
                await client.drain_worker("d7")
            with pytest.raises(InvalidRequest, match="last worker of its role"):
                await client.set_role("d0", Role.BOTH)
            await client.set_role("d0", Role.BOTH, force=True)
        while not isinstance(message := await wire.worker_end.receive(), SetRole):
            pass
        assert message.role is Role.BOTH
        with pytest.raises(Unauthenticated):  # a caller that has one wants it proven
            await strict.drain_worker("d0", force=True)


async def test_the_service_is_for_those_who_know_the_cluster_s_secret() -> None:
    async with admin_door(SECRET) as (address, wire):
        for secret in (None, b"x" * 32):
            async with OperatorClient(address, secret=secret) as stranger:
                for ask in (stranger.drain_worker("d0", force=True), stranger.drain_worker("d7")):
                    with pytest.raises(Unauthenticated) as refused:
                        await ask
                    assert isinstance(refused.value, PdserveError)
        async with OperatorClient(address, secret=SECRET) as client:
            await client.drain_worker("d0", force=True)
        while not isinstance(await wire.worker_end.receive(), Drain):
            pass


async def test_what_scaling_decided_is_told_by_the_status_and_kept_while_nothing_changes() -> None:
    async with admin_door(SECRET) as (address, _), OperatorClient(address, secret=SECRET) as client:
        assert (await client.status()).scaling is None
        grown = ScalingNote(num_prefill=2, num_decode=1, why="all", change="prefill 1 → 2: a queue")
        await client.note_scaling(grown)
        await client.note_scaling(ScalingNote(num_prefill=2, num_decode=1, why="at ease"))
        told = (await client.status()).scaling
        assert told is not None
        assert (told.num_prefill, told.num_decode, told.why) == (2, 1, "at ease")
        assert told.last_change == "prefill 1 → 2: a queue"
        assert told.change_age_s >= told.age_s >= 0
        async with OperatorClient(address) as stranger:
            with pytest.raises(Unauthenticated):
                await stranger.note_scaling(grown)


@virtual
async def test_scaling_is_in_the_metrics() -> None:
    async with Cluster() as cluster:
        notes, registry = cluster.app.operators.scaling, cluster.app.metrics.registry
        assert registry.get_sample_value("pdserve_scaling_workers_wanted", {"role": "decode"}) is None
        notes.note(ScalingNote(num_prefill=1, num_decode=3, why="", change="w" * 5000))
        notes.note(ScalingNote(num_prefill=1, num_decode=3, why=""))
        assert registry.get_sample_value("pdserve_scaling_workers_wanted", {"role": "decode"}) == 3
        assert registry.get_sample_value("pdserve_scaling_looks_total") == 2
        assert registry.get_sample_value("pdserve_scaling_changes_total") == 1
        told = cluster.app.status().scaling
        assert told is not None and len(told.last_change) == MAX_WORDS
