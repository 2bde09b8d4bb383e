"""Links over TCP with TLS, in real processes: right texts, also when P or D is killed while KV moves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import pytest

from pdserve.client import AsyncClient, ClientTls
from tests.support.asking import Question, ask, at_rest
from tests.support.certificates import WORKER_NAME, Authority, Signed, needs_openssl
from tests.support.mid_pull import in_mid_pull, received_bytes
from tests.support.processes import run_cli
from tests.support.singles import Singles
from tests.support.waiting import until

HEARTBEAT_S = 0.1
ROUTER_NAME = "router.test"
FAKE = (
    *("--engine", "fake", "--engine.num-blocks", "1024", "--timeouts.heartbeat-s", f"{HEARTBEAT_S}"),
    *("--transport.link-tls=true", "--transport.prefer-unix=false", "--tls.worker-name", WORKER_NAME),
)
SMALL_CHUNKS = ("--engine.max-step-tokens", "4")  # blocks leave all the while
WORKERS = ["d0", "d1", "p0", "p1"]

pytestmark = needs_openssl


@dataclass(frozen=True)
class Encrypted:
    """Two prefill and two decode workers, and what a client or an operator shows to their router."""

    cluster: Singles
    tls: ClientTls

    def client(self) -> AsyncClient:
        return AsyncClient(self.cluster.all["r0"].address, tls=self.tls)


def shown(signed: Signed) -> tuple[str, ...]:
    return ("--tls.cert-file", f"{signed.cert}", "--tls.key-file", f"{signed.key}")


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Encrypted]:
    folder = tmp_path_factory.mktemp("encrypted")
    authority = Authority(folder, "cluster")
    worker = authority.sign(WORKER_NAME)
    with Singles(folder, "--tls.ca-file", f"{authority.cert}", "--tls.server-name", ROUTER_NAME) as made:
        made.router("r0", *shown(authority.sign(ROUTER_NAME)))
        for name in ("p0", "p1"):
            made.worker("prefill", name, *FAKE, *SMALL_CHUNKS, *shown(worker))
        for name in ("d0", "d1"):
            made.worker("decode", name, *FAKE, *shown(worker))
        tls = ClientTls(
            ca=f"{authority.cert}", cert=f"{worker.cert}", key=f"{worker.key}", server_name=ROUTER_NAME
        )
        yield Encrypted(made.start(), tls)


async def test_every_pair_is_encrypted(encrypted: Encrypted) -> None:
    tls = encrypted.tls
    async with encrypted.client() as client:
        await at_rest(client, WORKERS, heartbeat_s=HEARTBEAT_S)
    flags = (
        "--tls-ca",
        tls.ca,
        "--tls-cert",
        tls.cert,
        "--tls-key",
        tls.key,
        "--tls-server-name",
        ROUTER_NAME,
    )
    target = encrypted.cluster.all["r0"].operators
    doctor = await asyncio.to_thread(run_cli, "doctor", "--target", target, "--tokens", "200", *flags)
    assert doctor.returncode == 0, doctor.stdout + doctor.stderr
    pairs = [line for line in doctor.stdout.splitlines() if " > " in line]
    assert len(pairs) == 4 and all("over stream-tls" in line for line in pairs), doctor.stdout


@pytest.mark.parametrize("role", ["decode", "prefill"])
async def test_killed_while_kv_moves(encrypted: Encrypted, role: str) -> None:
    cluster = encrypted.cluster
    decodes = [each for each in cluster.workers if each.role == "decode"]
    question = Question.draw(Random(role), 8_000, 40)
    async with encrypted.client() as client:
        await at_rest(client, WORKERS, heartbeat_s=HEARTBEAT_S)
        before = await received_bytes(decodes)
        answer = asyncio.create_task(ask(client, question))
        hit = await until(
            f"a {role} worker in mid-pull",
            lambda: in_mid_pull([each for each in cluster.workers if each.role == role], decodes, before),
            told=cluster.log_tails,
        )
        hit.kill()
        finished = await answer
        assert finished.num_attempts > 1 and hit.id not in (finished.prefill_worker, finished.decode_worker)
        hit.start()
        await at_rest(client, WORKERS, heartbeat_s=HEARTBEAT_S)
