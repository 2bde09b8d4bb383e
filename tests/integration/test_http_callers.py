"""Who may come in by HTTP, and what happens on the workers when somebody leaves: real processes."""

from __future__ import annotations

import asyncio
import signal
import ssl
from pathlib import Path
from typing import Any

import pytest

from pdserve.client import AsyncClient
from tests.integration.test_api_keys import FAKE, add_key
from tests.support.asking import at_rest
from tests.support.certificates import Authority, needs_openssl
from tests.support.http_calls import Reply, call, stream
from tests.support.processes import run_cli
from tests.support.singles import Singles
from tests.support.waiting import until

ENDLESS: dict[str, Any] = {"prompt": "hello", "max_tokens": 3_000, "ignore_eos": True, "stream": True}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def test_keys_and_limits_are_those_of_grpc_at_the_router_and_through_a_gateway(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    acme = add_key(file, "--tenant", "acme", "--max-concurrent", "1")
    busy = add_key(file, "--tenant", "busy", "--requests-per-minute", "1")
    ops = add_key(file, "--tenant", "ops", "--admin")
    with Singles(tmp_path) as cluster:
        at = cluster.reserve()
        router = cluster.router("r0", "--router.keys-file", str(file), "--http-listen", at)
        cluster.worker("prefill", "p0", *FAKE)
        cluster.worker("decode", "d0", *FAKE)
        gateway = cluster.gateway("g0")
        cluster.start()
        async with AsyncClient(router.address, api_key=ops) as of_ops:
            await at_rest(of_ops, ["p0", "d0"])
        for address in (at, gateway.address):
            await gateway.ready()
            ask = {"prompt": "hello", "max_tokens": 3}
            for headers in ({}, bearer("pdk_000000000000_" + "0" * 40), {"Authorization": "Basic x"}):
                for path, body in (("/v1/completions", ask), ("/v1/models", None), ("/tokenize", ask)):
                    assert (await call(address, path, body, headers=headers)).status == 401
            assert (await call(address, "/v1/completions", ask, headers=bearer(acme))).status == 200
            assert (await call(address, "/v1/models", headers=bearer(acme))).status == 200
            async with stream(address, "/v1/completions", ENDLESS, headers=bearer(acme)) as running:
                await anext(running.events())
                second = await call(address, "/v1/completions", ask, headers=bearer(acme))
                assert (second.status, second.error["type"]) == (429, "rate_limit_error")
                assert int(second.headers["retry-after"]) >= 1
                several = {"prompt": ["a", "b"], "max_tokens": 3}
            assert (await of_busy(address, ask, busy)).status == (200 if address == at else 429)
            refused = await until("its place is free", lambda: at_once(address, several, acme))  # noqa: B023
            assert refused.error["code"] == "rate_limit_exceeded", "each prompt is a generation"
        assert (await call(at, "/metrics", headers=bearer(acme))).status == 403
        assert b"pdserve_tenant_requests" in (await call(at, "/metrics", headers=bearer(ops))).body
        assert (await call(at, "/metrics")).status == 401
        assert (await call(at, "/health")).status == 200


async def of_busy(address: str, ask: dict[str, Any], key: str) -> Reply:
    return await call(address, "/v1/completions", ask, headers=bearer(key))


async def at_once(address: str, body: dict[str, Any], key: str) -> Reply | None:
    """What two prompts of one call are told, where one at a time is allowed; None if the place isn't free yet."""
    if (await call(address, "/v1/completions", {"prompt": "x"}, headers=bearer(key))).status != 200:
        return None
    return await call(address, "/v1/completions", body, headers=bearer(key))


@pytest.mark.parametrize("through", ["router", "gateway"])
async def test_a_client_that_leaves_ends_its_request_on_both_workers(tmp_path: Path, through: str) -> None:
    # A thousand tokens take 100 s, longer than anybody waits here.
    slow = ("--engine.fake-token-s", "0.1", "--engine.max-step-tokens", "4")
    with Singles(tmp_path, "--timeouts.heartbeat-s", "0.1") as cluster:
        at = cluster.reserve()
        router = cluster.router("r0", "--http-listen", at)
        prefill = cluster.worker("prefill", "p0", *FAKE, *slow)
        decode = cluster.worker("decode", "d0", *FAKE)
        gateway = cluster.gateway("g0")
        cluster.start()
        address = at if through == "router" else gateway.address
        async with AsyncClient(router.address) as client:
            await at_rest(client, ["p0", "d0"], heartbeat_s=0.1)
            await gateway.ready()

            async def running() -> bool:
                return any(each.num_running for each in (await client.status()).workers)

            # Before the first part.
            long = asyncio.create_task(
                call(address, "/v1/completions", {"prompt": "x" * 1000, "max_tokens": 9})
            )
            await until("the prompt is computed", running, told=prefill.log_tail)
            long.cancel()
            clock = asyncio.get_running_loop().time
            left_s = clock()
            await at_rest(client, ["p0", "d0"], heartbeat_s=0.1)
            print(f"{through}: at rest {clock() - left_s:.2f} s after its client left")
            # In the middle.
            async with stream(address, "/v1/completions", ENDLESS) as answer:
                await anext(answer.events())
                await until("it runs", running, told=decode.log_tail)
            left_s = clock()
            await at_rest(client, ["p0", "d0"], heartbeat_s=0.1)
            print(f"{through}: at rest {clock() - left_s:.2f} s after its client left")


async def test_a_draining_router_ends_its_streams_by_an_event_and_takes_no_more(tmp_path: Path) -> None:
    with Singles(tmp_path, "--timeouts.drain-s", "1") as cluster:
        at = cluster.reserve()
        router = cluster.router("r0", "--http-listen", at)
        cluster.worker("prefill", "p0", *FAKE)
        cluster.worker("decode", "d0", *FAKE, "--engine.fake-step-s", "0.05")
        cluster.start()
        async with AsyncClient(router.address) as client:
            await at_rest(client, ["p0", "d0"])
        bad = await call(at, "/v1/completions", {"prompt": 5})
        assert bad.status == 400
        assert await router.metric("pdserve_requests_total", status="INVALID_ARGUMENT") == 1
        async with stream(at, "/v1/completions", ENDLESS | {"request_id": "mine"}) as answer:
            assert answer.headers["x-request-id"] == "mine"
            events = answer.events()
            await anext(events)
            router.send(signal.SIGTERM)

            async def refuses() -> bool:
                reply = await call(at, "/v1/completions", {"prompt": "x"})
                return reply.status == 503 and "draining" in reply.error["message"]

            await until("new ones are refused", refuses, told=router.log_tail)
            assert (await call(at, "/health")).status == 503
            last = [event async for event in events][-1]
        assert "draining: resume at another one" in last["error"]["message"]
        assert await asyncio.to_thread(router.wait) == 0


@needs_openssl
async def test_tls_is_that_of_the_clients_address(tmp_path: Path) -> None:
    authority, clients = Authority(tmp_path, "inner"), Authority(tmp_path, "outer")
    shown, user = authority.sign("router.test"), clients.sign("user.test")
    files = ("--tls.cert-file", str(shown.cert), "--tls.key-file", str(shown.key))
    asks = ("--tls.client-ca-file", str(clients.cert))
    with Singles(tmp_path) as cluster:
        at = cluster.reserve()
        router = cluster.router("r0", *files, *asks, "--http-listen", at)
        cluster.start()
        tls = context(authority)
        tls.load_cert_chain(user.cert, user.key)

        async def listens() -> bool:
            return "router.listening" in router.log_tail()

        await until("it listens", listens, told=router.log_tail)
        assert (await call(at, "/version", tls=tls)).status == 200
        for stranger in (context(authority), None):
            with pytest.raises((ssl.SSLError, ConnectionError, asyncio.IncompleteReadError)):
                await call(at, "/version", tls=stranger)
        # Another authority's certificate, in the same files: from the next connection on.
        other = Authority(tmp_path, "other")
        renewed = other.sign("router.test", "renewed")
        shown.key.write_bytes(renewed.key.read_bytes())
        shown.cert.write_bytes(renewed.cert.read_bytes())

        async def is_renewed() -> bool:
            trusting = context(other)
            trusting.load_cert_chain(user.cert, user.key)
            try:
                return (await call(at, "/version", tls=trusting)).status == 200
            except ssl.SSLError:
                return False

        await until("it shows the new one", is_renewed, told=router.log_tail)


def context(authority: Authority) -> ssl.SSLContext:
    """Of a client that believes this authority, whatever the name."""
    made = ssl.create_default_context(cafile=str(authority.cert))
    made.check_hostname = False
    return made


@pytest.mark.parametrize("command", ["router", "gateway"])
def test_an_address_that_strangers_reach_must_be_guarded(command: str) -> None:
    flag = "--http-listen" if command == "router" else "--listen"
    done = run_cli(command, flag, "0.0.0.0:0")
    assert done.returncode == 2
    assert "http.listen 0.0.0.0:0: strangers could reach it" in done.stderr
