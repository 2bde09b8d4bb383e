"""The cluster secret on a session: both sides prove it, or nobody gets in."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog

from pdserve import messages as m
from pdserve.errors import Unauthenticated, WorkerLost
from pdserve.messages import Down, Up
from pdserve.rpc.v1 import session_pb2_grpc
from pdserve.service.peer_proof import NONCE_LIFE_S, Metadata, RouterGuard, challenge_of, read_metadata
from pdserve.service.rpc import open_channel
from pdserve.service.secret import prove, proves, read_secret
from pdserve.service.settings import ConfigError
from pdserve.session import Session
from tests.contract.sessions.wires import KEEPALIVE_S, grpc_server, make_dialer, no_session
from tests.support.virtual_clock import VirtualClock

SECRET = b"a" * 32
OTHER = b"b" * 32


async def greet(session: Session[Down, Up]) -> None:
    session.send(m.Welcome("r0"))
    with pytest.raises(WorkerLost):
        await session.receive()


@pytest.mark.parametrize("secret", [None, SECRET], ids=["without", "with"])
async def test_equal_secrets_meet(secret: bytes | None) -> None:
    async with (
        asyncio.timeout(60),
        asyncio.TaskGroup() as tasks,
        grpc_server(greet, tasks, secret=secret) as address,
    ):
        session = await make_dialer(tasks, secret).dial(address)
        assert await session.receive() == m.Welcome("r0")
        session.close("done")


@pytest.mark.parametrize(
    ("theirs", "ours", "said"),
    [
        (SECRET, None, "the router wants cluster.secret_file proven, which isn't set here"),
        (SECRET, OTHER, "the router doesn't accept the proof: is its cluster.secret_file another?"),
        (None, SECRET, "the router can't prove the cluster secret"),
    ],
    ids=["worker has none", "another", "router has none"],
)
async def test_others_do_not(theirs: bytes | None, ours: bytes | None, said: str) -> None:
    on_session = greet if theirs is None else no_session
    async with (
        asyncio.timeout(60),
        asyncio.TaskGroup() as tasks,
        grpc_server(on_session, tasks, secret=theirs) as address,
    ):
        with structlog.testing.capture_logs() as logs, pytest.raises(Unauthenticated) as refused:
            await make_dialer(tasks, ours).dial(address)
    assert said in str(refused.value)
    assert len(logs) == (theirs is not None), "the router says why, in its own log"


async def test_a_stranger_is_told_nothing() -> None:
    """Neither whether its proof, its nonce or its name was wrong, nor which router this is."""
    made_up: Metadata = (("pdserve-worker", "w0"), ("pdserve-epoch", "1-2"), ("pdserve-nonce-bin", b"n" * 32))
    async with (
        asyncio.timeout(60),
        asyncio.TaskGroup() as tasks,
        grpc_server(no_session, tasks, secret=SECRET) as address,
        open_channel(address, keepalive_s=KEEPALIVE_S) as channel,
    ):
        method: Any = session_pb2_grpc.WorkersStub(channel).Session
        knock = method(metadata=made_up)
        live = challenge_of(await knock.trailing_metadata())
        assert live
        for challenge in (b"", b"made up", live):
            for secret in (OTHER, SECRET):
                proof = prove(secret, "worker", b"other nonce", challenge, "w0", "1-2")
                call = method(
                    metadata=(*made_up, ("pdserve-challenge-bin", challenge), ("pdserve-proof-bin", proof))
                )
                assert not read_metadata(await call.initial_metadata())
                assert (await call.code(), await call.details()) == (
                    grpc.StatusCode.UNAUTHENTICATED,
                    "not known here",
                )


async def test_nobody_there_is_worker_lost() -> None:
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        async with grpc_server(no_session, tasks) as address:
            pass
        with pytest.raises(WorkerLost, match="no session with the router"):
            await make_dialer(tasks).dial(address)


def test_a_nonce_is_good_once_and_for_a_while() -> None:
    clock = VirtualClock()
    guard = RouterGuard("r0", SECRET, clock, random.Random(1))
    first, second = guard.challenge(), guard.challenge()
    assert guard.spend(first)
    assert not guard.spend(first)
    clock.advance(NONCE_LIFE_S - 0.1)
    assert not guard.spend(first)
    clock.advance(0.2)
    assert not guard.spend(second)
    assert not guard.spend(b"made up") and not guard.spend(b"")
    assert not RouterGuard("r1", SECRET, clock, random.Random(2)).spend(guard.challenge())


def test_however_many_strangers_knock_one_who_is_known_gets_in() -> None:
    guard = RouterGuard("r0", SECRET, VirtualClock(), random.Random(1))
    known = guard.challenge()
    for _ in range(5_000):
        guard.challenge()
    assert guard.spend(known)


def test_a_proof_is_bound_to_role_and_to_every_part() -> None:
    proof = prove(SECRET, "worker", b"n1", b"n2", "w0", "epoch")
    assert proves(proof, SECRET, "worker", b"n1", b"n2", "w0", "epoch")
    assert not proves(proof, SECRET, "router", b"n1", b"n2", "w0", "epoch")
    assert not proves(proof, SECRET, "worker", b"n1n", b"2", "w0", "epoch")
    assert not proves(proof, OTHER, "worker", b"n1", b"n2", "w0", "epoch")


def test_the_secret_file(tmp_path: Path) -> None:
    assert read_secret("") is None
    good = tmp_path / "good"
    good.write_bytes(SECRET + b"\n")
    assert read_secret(str(good)) == SECRET
    short = tmp_path / "short"
    short.write_bytes(b"short\n")
    with pytest.raises(ConfigError, match="must hold at least 32 bytes, got 5"):
        read_secret(str(short))
    with pytest.raises(ConfigError, match="can't be read"):
        read_secret(str(tmp_path / "none"))
