"""Clients that must show an API key, over real sockets, with the commands that make keys."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import grpc
import pytest

from pdserve.client import AsyncClient
from pdserve.errors import Overloaded, PdserveError, PermissionDenied, Unauthenticated, UnknownRequest
from pdserve.operator_client import OperatorClient
from pdserve.request import GenerateRequest, Tokens
from pdserve.sampling import SamplingParams
from tests.support.processes import run_cli
from tests.support.singles import Singles
from tests.support.waiting import until

FAKE = ("--engine", "fake", "--engine.num-blocks", "256")
LONG = SamplingParams(max_tokens=3_000)


def add_key(file: Path, *arguments: str) -> str:
    """A new key, by command."""
    made = run_cli("keys", "add", "--file", str(file), *arguments)
    assert made.returncode == 0, made.stderr
    return made.stdout.strip()


async def refusal(call: Awaitable[object]) -> PdserveError:
    with pytest.raises(PdserveError) as refused:
        await call
    return refused.value


async def test_who_has_no_key_gets_nothing_and_who_has_one_its_own(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    acme, bigco = (add_key(file, "--tenant", tenant) for tenant in ("acme", "bigco"))
    ops = add_key(file, "--tenant", "ops", "--admin")
    with Singles(tmp_path) as cluster:
        router = cluster.router("r0", "--router.keys-file", str(file))
        cluster.worker("prefill", "p0", *FAKE)
        cluster.worker("decode", "d0", *FAKE)
        cluster.start()
        async with (
            AsyncClient(router.address) as nobody,
            AsyncClient(router.address, api_key=acme) as of_acme,
            AsyncClient(router.address, api_key=bigco) as of_bigco,
            AsyncClient(router.address, api_key=ops) as of_ops,
        ):
            await until("a pair is up", lambda: has_pair(of_ops), told=cluster.log_tails)
            refused_calls: list[Awaitable[object]] = [
                nobody.generate_text("hi"),
                nobody.tokenize("hi"),
                nobody.detokenize([1]),
                nobody.abort("x"),
                nobody.model(),
                nobody.status(explain=True),
            ]
            for call in refused_calls:
                error = await refusal(call)
                assert (type(error), error.message) == (Unauthenticated, "no valid API key")
            await message_stays_unread(router.address)

            stream = of_acme.generate(GenerateRequest(input="hello", request_id="mine", sampling=LONG))
            async for event in stream:
                if isinstance(event, Tokens):
                    break
            assert isinstance(await refusal(of_bigco.abort("mine")), UnknownRequest)
            seen = (
                [each.request_id for each in (await of_bigco.status(explain=True)).placements],
                [each.request_id for each in (await of_acme.status(explain=True)).placements],
            )
            assert seen == ([], ["mine"])
            assert not (await of_bigco.status()).workers
            await of_ops.abort("mine")
            with pytest.raises(PdserveError, match="aborted"):
                async for _ in stream:
                    pass
            assert (await of_acme.generate_text(GenerateRequest(input="hello"))).text

        async with OperatorClient(router.operators, api_key=bigco) as client:
            assert isinstance(await refusal(client.drain_worker("d0", force=True)), PermissionDenied)
        shown = await asyncio.to_thread(
            run_cli, "status", "--target", router.address, env={"PDSERVE_API_KEY": ops}
        )
        assert "p0" in shown.stdout
        refused = await asyncio.to_thread(run_cli, "status", "--target", router.address)
        assert (refused.returncode, refused.stderr.strip()) == (1, "error: no valid API key")
        drained = await asyncio.to_thread(
            run_cli, "drain", "--worker", "d0", "--force", "--target", router.operators, "--api-key", ops
        )
        assert drained.returncode == 0, drained.stderr
        assert await asyncio.to_thread(cluster.all["d0"].wait) == 0
        assert await router.metric("pdserve_calls_refused_total", status="UNAUTHENTICATED") >= 8
        assert await router.metric("pdserve_tenant_requests_total", tenant="acme", status="OK") == 1
        logs = "".join(each.log.read_text() for each in cluster.all.values())
        finished = [json.loads(line) for line in logs.splitlines() if '"request.finished"' in line]
        assert {line["tenant"] for line in finished} == {"acme"}
        assert not any(key.rpartition("_")[2] in logs for key in (acme, bigco, ops))


async def has_pair(client: AsyncClient) -> bool:
    try:
        return any(pair.up for pair in (await client.status()).pairs)
    except PdserveError:
        return False


async def message_stays_unread(address: str) -> None:
    """What can't be parsed is refused for want of a key."""
    async with grpc.aio.insecure_channel(address) as channel:
        ask: Any = channel.unary_unary
        call = ask("/pdserve.rpc.v1.Inference/Tokenize")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(b"\xff" * 1000)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_limits_and_changes_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    single = add_key(file, "--tenant", "acme", "--max-concurrent", "1")
    slow = add_key(file, "--tenant", "acme", "--requests-per-minute", "1")
    with Singles(tmp_path) as cluster:
        router = cluster.router("r0", "--router.keys-file", str(file))
        worker = cluster.worker("both", "b0", *FAKE)
        router.start()
        async with AsyncClient(router.address, api_key=single) as client:
            await until("the router listens", lambda: answers(client))
            waiting = asyncio.create_task(client.generate_text("hello"))  # there is no worker yet

            async def waits() -> bool:
                return await router.metric("pdserve_requests_running") == 1

            await until("the first request waits", waits)
            busy = await refusal(client.generate_text("hello"))
            assert isinstance(busy, Overloaded) and "limit=max_concurrent" in str(busy)
            worker.start()
            assert (await waiting).text
        async with AsyncClient(router.address, api_key=slow) as client:
            await client.tokenize("hello")
            over = await refusal(client.tokenize("hello"))
            assert isinstance(over, Overloaded) and 0 < over.retry_after_s <= 60
            assert "requests_per_minute" in str(over)
        late = add_key(file, "--tenant", "late")

        async def is_known() -> bool:
            try:
                await client_of_late.tokenize("hello")
            except Unauthenticated:
                return False
            return True

        async with AsyncClient(router.address, api_key=late) as client_of_late:
            await until("a new key is known", is_known)
            revoked = run_cli("keys", "revoke", "--file", str(file), late)
            assert revoked.returncode == 0, revoked.stderr

            async def is_revoked() -> bool:
                return not await is_known()

            await until("a revoked key isn't", is_revoked)
        listed = run_cli("keys", "list", "--file", str(file)).stdout.split()
        single_id, slow_id = (key.split("_")[1] for key in (single, slow))
        assert listed == [single_id, "acme", "max_concurrent=1", slow_id, "acme", "requests_per_minute=1"]
        file.write_text("broken")
        await until("a broken file is told", lambda: said(router.log, "keys.unreadable"))
        async with AsyncClient(router.address, api_key=slow) as client:
            assert isinstance(await refusal(client.abort("none")), UnknownRequest), "and changes nothing"


async def answers(client: AsyncClient) -> bool:
    return isinstance(await refusal(client.abort("none")), UnknownRequest)


async def said(log: Path, event: str) -> bool:
    return event in log.read_text()
