"""A call to a router that may ask for the cluster secret first: by a worker that joins, or by an operator."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from pdserve.errors import Unauthenticated
from pdserve.service.peer_proof import ROUTER_KEY, Metadata, WorkerProof, challenge_of, read_metadata
from pdserve.service.rpc_errors import ServerLost, error_of


async def open_proven(
    begin: Callable[[Metadata], Any], proof: WorkerProof, address: str, limit_s: float
) -> Any:
    """A call that the router has let in; both have proven the secret if there is one.

    begin    makes the call with this metadata
    limit_s  how long it may take to be let in
    Raises what the router's refusal says, ServerLost if nobody answers, Unauthenticated if the router proves nothing.
    """
    challenge = b""
    metadata = proof.knock()
    try:
        async with asyncio.timeout(limit_s):
            while True:
                call = begin(metadata)
                initial = await call.initial_metadata()
                if ROUTER_KEY in read_metadata(initial):
                    break
                code, trailing = await call.code(), await call.trailing_metadata()
                answer: Metadata | None = None
                if code is grpc.StatusCode.UNAUTHENTICATED and not challenge:
                    challenge = challenge_of(trailing)
                    answer = proof.answer(challenge)
                if answer is None:
                    status = grpc.aio.AioRpcError(code, initial, trailing, await call.details(), "")
                    told = error_of(status, address)
                    raise proof.explain(told) if isinstance(told, Unauthenticated) else told
                metadata = answer
    except TimeoutError:
        raise ServerLost("no answer in time", target=address, limit_s=limit_s) from None
    proof.check_router(initial, challenge, address)
    return call
