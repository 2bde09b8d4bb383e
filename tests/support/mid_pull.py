"""Which worker of a cluster holds a lease while KV moves."""

from __future__ import annotations

from tests.support.singles import Single


async def received_bytes(decodes: list[Single]) -> float:
    """Of all of them: over memfd a prefill worker sends nothing, and doesn't know how far its reader is."""
    received = [
        await each.metric("pdserve_kv_transfer_bytes_total", direction="received") for each in decodes
    ]
    return sum(received)


async def in_mid_pull(workers: list[Single], decodes: list[Single], before: float) -> Single | None:
    """The one of these workers that holds a lease, once bytes have moved."""
    if await received_bytes(decodes) > before:
        for worker in workers:
            if await worker.metric("pdserve_leases"):
                return worker
    return None
