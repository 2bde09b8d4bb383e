"""Every way in which a request can be served, over real sockets between real processes: roles, links, the secret."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from random import Random

import pytest

from pdserve.client import AsyncClient
from pdserve.request import GenerateRequest
from pdserve.sampling import SamplingParams
from pdserve.wire_version import WIRE_VERSION
from tests.support.asking import Question, ask, at_rest, status_of
from tests.support.processes import run_cli
from tests.support.singles import Singles
from tests.support.waiting import until

HEARTBEAT_S = 0.1
COMMON = ("--timeouts.heartbeat-s", f"{HEARTBEAT_S}")
FAKE = ("--engine", "fake", "--engine.num-blocks", "512")
SIZES = [(1, 1), (1, 40), (15, 20), (16, 20), (17, 20), (700, 3), (3_000, 60)]


async def serves(client: AsyncClient, workers: list[str]) -> set[tuple[str, str, str]]:
    """Ask for prompts of many sizes, each twice; by whom they were served, and over which transport."""
    await at_rest(client, workers, heartbeat_s=HEARTBEAT_S)
    random = Random(1)
    questions = [Question.draw(random, *size) for size in SIZES]
    finished = await asyncio.gather(*[ask(client, question) for question in (*questions, *questions)])
    await at_rest(client, workers, heartbeat_s=HEARTBEAT_S)
    return {(each.prefill_worker, each.decode_worker, each.transport) for each in finished}


@pytest.mark.parametrize(
    ("setting", "transport"),
    [
        ("--transport.strict=true", "memfd"),
        ("--transport.kinds=stream", "stream-unix"),
        ("--transport.prefer-unix=false", "stream-tcp"),
    ],
)
async def test_a_pair(tmp_path: Path, setting: str, transport: str) -> None:
    with Singles(tmp_path, *COMMON) as cluster:
        router = cluster.router("r0")
        for role, name in (("prefill", "p0"), ("decode", "d0")):
            cluster.worker(role, name, *FAKE, setting)
        cluster.start()
        async with AsyncClient(router.address) as client:
            served = await serves(client, ["d0", "p0"])
            # A first token that ends a request is not handed over.
            assert {(prefill, decode) for prefill, decode, _ in served} == {("p0", "d0")}
            assert {moved for _, _, moved in served} <= {transport, ""} and transport in {
                s[2] for s in served
            }


async def test_a_worker_that_does_both_alone_and_beside_a_pair(tmp_path: Path) -> None:
    with Singles(tmp_path, *COMMON) as cluster:
        router = cluster.router("r0")
        cluster.worker("both", "b0", *FAKE)
        cluster.start()
        async with AsyncClient(router.address) as client:
            assert await serves(client, ["b0"]) == {("", "b0", "")}
            cluster.worker("prefill", "p0", *FAKE)
            cluster.worker("decode", "d0", *FAKE)
            cluster.start()
            for prefill, decode, _ in await serves(client, ["b0", "d0", "p0"]):
                assert (prefill, decode) in {("", "b0"), ("p0", "b0"), ("p0", "d0")}


async def test_a_decode_worker_alone_where_that_is_allowed(tmp_path: Path) -> None:
    with Singles(tmp_path, *COMMON) as cluster:
        router = cluster.router("r0", "--router.allow-local-prefill", "true")
        cluster.worker("decode", "d0", *FAKE)
        cluster.start()
        async with AsyncClient(router.address) as client:
            assert await serves(client, ["d0"]) == {("", "d0", "")}


async def test_with_a_cluster_secret_and_one_who_has_another(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("0123456789abcdef" * 2)
    (tmp_path / "other").write_text("fedcba9876543210" * 2)
    with Singles(tmp_path, *COMMON) as cluster:
        secret = ("--cluster.secret-file", str(tmp_path / "secret"))
        router = cluster.router("r0", *secret)
        cluster.worker("prefill", "p0", *FAKE, *secret)
        cluster.worker("decode", "d0", *FAKE, *secret)
        stranger = cluster.worker("decode", "d1", *FAKE, "--cluster.secret-file", str(tmp_path / "other"))
        cluster.start()
        async with AsyncClient(router.address) as client:
            served = await serves(client, ["d0", "p0"])
            assert {decode for _, decode, _ in served} == {"d0"}
        assert "0123456789abcdef" not in "".join(single.log.read_text() for single in cluster.all.values())
        assert await asyncio.to_thread(stranger.terminate) == 0


@pytest.mark.parametrize("minor", range(WIRE_VERSION[1]))
@pytest.mark.parametrize("old", ["p0", "d0", "r0"])
async def test_with_one_process_of_an_earlier_minor_version(tmp_path: Path, old: str, minor: int) -> None:
    """As in the middle of an upgrade: each process in turn is the last that wasn't upgraded yet."""
    older = {old: ("--cluster.wire-minor", str(minor))}
    earlier, now = f"1.{minor}", f"1.{WIRE_VERSION[1]}"
    with Singles(tmp_path, *COMMON) as cluster:
        router = cluster.router("r0", *older.get("r0", ()))
        for role, name in (("prefill", "p0"), ("decode", "d0")):
            cluster.worker(role, name, *FAKE, *older.get(name, ()))
        cluster.start()
        async with AsyncClient(router.address) as client:
            served = await serves(client, ["d0", "p0"])
            assert {(prefill, decode) for prefill, decode, _ in served} == {("p0", "d0")}
        logs = {name: single.log.read_text() for name, single in cluster.all.items()}
    wire = {
        (name, line["event"]): line["wire"]
        for name, log in logs.items()
        for line in map(json.loads, log.splitlines())
        if line["event"] in ("link.up", "router.joined")
    }
    link = earlier if old in ("p0", "d0") else now
    session = {name: earlier if old in (name, "r0") else now for name in ("p0", "d0")}
    assert wire == {
        ("p0", "link.up"): link,
        ("d0", "link.up"): link,
        ("p0", "router.joined"): session["p0"],
        ("d0", "router.joined"): session["d0"],
    }


async def test_operators_change_roles_and_drain_by_command(tmp_path: Path) -> None:
    with Singles(tmp_path, *COMMON) as cluster:
        router = cluster.router("r0")
        cluster.worker("prefill", "p0", *FAKE)
        cluster.worker("decode", "d0", *FAKE)
        cluster.worker("decode", "d1", *FAKE)
        cluster.start()
        target = ("--target", router.operators)
        async with AsyncClient(router.address) as client:
            await at_rest(client, ["d0", "d1", "p0"], heartbeat_s=HEARTBEAT_S)
            refused = await asyncio.to_thread(run_cli, "drain", "--worker", "p0", *target)
            assert refused.returncode == 1 and "p0" in refused.stderr  # the last of its role

            changed = await asyncio.to_thread(run_cli, "role", "--worker", "d1", "--set", "prefill", *target)
            assert changed.returncode == 0, changed.stderr

            async def has_changed() -> bool:
                status = await status_of(client)
                return status is not None and any(
                    (each.id, each.role, each.state) == ("d1", "prefill", "up") for each in status.workers
                )

            await until("d1 prefills", has_changed)
            drained = await asyncio.to_thread(run_cli, "drain", "--worker", "p0", *target)
            assert drained.returncode == 0, drained.stderr
            assert await asyncio.to_thread(cluster.all["p0"].wait) == 0
            served = await serves(client, ["d0", "d1"])
            assert {(prefill, decode) for prefill, decode, _ in served} == {("d1", "d0")}
            shown = await asyncio.to_thread(run_cli, "status", "--target", router.address)
            assert "d1" in shown.stdout and "p0" not in shown.stdout


async def test_choices_and_stop_strings_over_the_wire(tmp_path: Path) -> None:
    with Singles(tmp_path, *COMMON) as cluster:
        router = cluster.router("r0")
        cluster.worker("prefill", "p0", *FAKE)
        cluster.worker("decode", "d0", *FAKE)
        cluster.start()
        async with AsyncClient(router.address) as client:
            await at_rest(client, ["d0", "p0"], heartbeat_s=HEARTBEAT_S)
            params = SamplingParams(max_tokens=60)
            whole = await client.generate_text(GenerateRequest(input="Once", seed=5, n=4, sampling=params))
            assert len({choice.text for choice in whole.choices}) == 4
            stop = whole.choices[2].text[30:34]
            params = SamplingParams(max_tokens=60, stop=(stop,))
            cut = await client.generate_text(GenerateRequest(input="Once", seed=5, n=4, sampling=params))
            for before, after in zip(whole.choices, cut.choices):
                assert after.text == before.text.split(stop)[0]
            await at_rest(client, ["d0", "p0"], heartbeat_s=HEARTBEAT_S)
