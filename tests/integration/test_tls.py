"""TLS and certificates of both sides, over real sockets between real processes."""

from __future__ import annotations

import asyncio
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.client import AsyncClient, ClientTls
from pdserve.errors import PdserveError
from pdserve.operator_client import OperatorClient
from pdserve.service.settings import ConfigError
from pdserve.service.tls import server_credentials, worker_tls
from pdserve.service.tls_config import TlsConfig
from tests.support.certificates import Authority, Signed, needs_openssl
from tests.support.processes import run_cli
from tests.support.singles import Singles
from tests.support.waiting import until

FAKE = ("--engine", "fake", "--engine.num-blocks", "256")
NAME = "router.test"

pytestmark = needs_openssl


def shown(signed: Signed) -> tuple[str, ...]:
    return ("--tls.cert-file", str(signed.cert), "--tls.key-file", str(signed.key))


async def serves(client: AsyncClient) -> bool:
    try:
        return any(pair.up for pair in (await client.status()).pairs)
    except PdserveError:
        return False


async def refused(client: AsyncClient | OperatorClient) -> bool:
    with pytest.raises(PdserveError):
        await client.status()
    return True


async def test_both_sides_show_certificates_and_others_do_not_get_in(tmp_path: Path) -> None:
    inner, outer, foreign = (Authority(tmp_path, name) for name in ("inner", "outer", "foreign"))
    router_cert, worker_cert = inner.sign(NAME), inner.sign("worker.test")
    user, stranger = outer.sign("user.test"), foreign.sign(NAME, "stranger")
    inside = ("--tls.ca-file", str(inner.cert), "--tls.server-name", NAME)
    with Singles(tmp_path) as cluster:
        router = cluster.router("r0", *shown(router_cert), *inside, "--tls.client-ca-file", str(outer.cert))
        cluster.worker("prefill", "p0", *FAKE, *inside, *shown(worker_cert))
        cluster.worker("decode", "d0", *FAKE, *inside, *shown(worker_cert))
        others = [
            cluster.worker("decode", "without", *FAKE),
            cluster.worker("decode", "uncertified", *FAKE, *inside),
            cluster.worker("decode", "foreign", *FAKE, *inside, *shown(stranger)),
            cluster.worker(
                "decode",
                "wrong-name",
                *FAKE,
                *inside[:2],
                "--tls.server-name",
                "other.test",
                *shown(worker_cert),
            ),
        ]
        cluster.start()
        tls = ClientTls(ca=str(inner.cert), cert=str(user.cert), key=str(user.key), server_name=NAME)
        async with AsyncClient(router.address, tls=tls) as client:
            await until("a pair serves", lambda: serves(client), told=cluster.log_tails)
            assert (await client.generate_text("hello")).text
            for other in others:
                await until(f"{other.id} is told", lambda: told(other.log))  # noqa: B023
            assert sorted(worker.id for worker in (await client.status()).workers) == ["d0", "p0"]

        own = ClientTls(
            ca=str(inner.cert), cert=str(worker_cert.cert), key=str(worker_cert.key), server_name=NAME
        )
        for wrong in (
            None,
            ClientTls(ca=str(inner.cert), server_name=NAME),
            ClientTls(ca=str(foreign.cert), cert=tls.cert, key=tls.key, server_name=NAME),
            ClientTls(ca=str(inner.cert), cert=tls.cert, key=tls.key, server_name="other.test"),
            own,
        ):
            async with AsyncClient(router.address, tls=wrong) as stranger_client:
                assert await refused(stranger_client)
        async with OperatorClient(router.operators, tls=own) as operator:
            assert (await operator.status()).workers
        async with OperatorClient(router.operators, tls=tls) as outsider:
            assert await refused(outsider)
        flags = ("--tls-ca", tls.ca, "--tls-cert", tls.cert, "--tls-key", tls.key, "--tls-server-name", NAME)
        by_command = await asyncio.to_thread(run_cli, "status", "--target", router.address, *flags)
        assert by_command.returncode == 0 and "p0" in by_command.stdout, by_command.stderr


async def told(log: Path) -> bool:
    return log.exists() and "router.unreachable" in log.read_text()


async def test_a_changed_certificate_counts_from_the_next_connection_on(tmp_path: Path) -> None:
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    used = old.sign(NAME, "used")
    with Singles(tmp_path) as cluster:
        router = cluster.router("r0", *shown(used))
        router.start()

        async def accepts(authority: Authority) -> bool:
            tls = ClientTls(ca=str(authority.cert), server_name=NAME)
            async with AsyncClient(router.address, tls=tls) as client:
                try:
                    await client.status()
                except PdserveError:
                    return False
                return True

        await until("the router serves TLS", lambda: accepts(old), told=cluster.log_tails)
        used.cert.write_text("broken")
        assert await accepts(old), "what can't be used changes nothing"
        replaced = new.sign(NAME, "replaced")
        replaced.key.replace(used.key)
        replaced.cert.replace(used.cert)
        await until("the new certificate is shown", lambda: accepts(new), told=cluster.log_tails)
        assert not await accepts(old)
        log = router.log.read_text()
        assert "certificates.unusable" in log and "certificates.changed" in log


def test_files_that_cannot_be_used_are_told_at_the_start(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ca")
    one, other = authority.sign("one.test"), authority.sign("other.test")
    for wrong, said in (
        (TlsConfig(cert_file=str(one.cert)), "belong together"),
        (TlsConfig(cert_file=str(one.cert), key_file=str(other.key)), "can't be used"),
        (TlsConfig(cert_file=str(tmp_path / "none"), key_file=str(one.key)), "none: can't be read"),
    ):
        with pytest.raises(ConfigError, match=said):
            server_credentials(wrong, "")
    with pytest.raises(ConfigError, match=r"need tls\.cert_file"):
        server_credentials(TlsConfig(), str(authority.cert))
    with pytest.raises(ConfigError, match="can't be read"):
        worker_tls(TlsConfig(ca_file=str(tmp_path / "none")))
    assert server_credentials(TlsConfig(), "") is None and worker_tls(TlsConfig()) is None


def test_a_key_with_a_passphrase_is_refused_and_not_asked_for(tmp_path: Path) -> None:
    """Also where there is a terminal to ask on, which would hold the process before it says anything."""
    made = Authority(tmp_path, "ca").sign("one.test")
    locked = tmp_path / "locked.key"
    command = ("openssl", "ec", "-in", f"{made.key}", "-aes256", "-passout", "pass:abcd", "-out", f"{locked}")
    subprocess.run(command, check=True, capture_output=True)
    words = (
        "router",
        "--listen",
        "127.0.0.1:0",
        "--tls.cert-file",
        f"{made.cert}",
        "--tls.key-file",
        f"{locked}",
    )
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, (sys.executable, "-m", "pdserve.cli", *words))
    said = b""
    try:
        while b"can't be used" not in said and b"pass phrase" not in said:
            said += os.read(terminal, 4096)
    except OSError:  # the terminal's other end has closed
        pass
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(terminal)
    assert b"can't be used" in said and b"pass phrase" not in said, said
