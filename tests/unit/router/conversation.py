"""Parts of an attempt's conversation that many tests begin with."""

from __future__ import annotations

from pdserve.messages import StartDecode, StartPrefill
from tests.unit.router.scripted import Client, Cluster, ScriptedWorker

A, B, C, D = b"abcd"


async def until_prefill(
    cluster: Cluster, p: ScriptedWorker, d: ScriptedWorker, **fields: object
) -> tuple[Client, StartDecode, StartPrefill]:
    client = cluster.generate("hello", **fields)  # type: ignore[arg-type]
    start = await d.expect(StartDecode)
    d.grant(start)
    return client, start, await p.expect(StartPrefill)


async def until_running(
    cluster: Cluster, p: ScriptedWorker, d: ScriptedWorker, **fields: object
) -> tuple[Client, StartDecode]:
    client, start, prefill = await until_prefill(cluster, p, d, **fields)
    p.first(prefill, A)
    d.started(start, A)
    d.tokens(start, 6, B)
    await cluster.settle()
    assert client.ids() == [A, B]
    return client, start


async def serve(
    p: ScriptedWorker,
    d: ScriptedWorker,
    *ids: int,
    start: StartDecode | None = None,
    prefill_s: float = 0.003,
) -> StartDecode:
    """Both workers do their part: the attempt gives `ids` and ends."""
    start = start if start is not None else await d.expect(StartDecode)
    d.grant(start)
    p.first(await p.expect(StartPrefill), ids[0], prefill_s=prefill_s)
    d.started(start, ids[0])
    at = len(start.token_ids) + 1
    if len(ids) > 1:
        d.tokens(start, at, *ids[1:])
    d.finished(start, at + len(ids) - 1)
    return start
