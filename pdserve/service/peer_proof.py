"""Who may open a session: the cluster secret proven by both sides in the metadata of the call.

A worker's first call carries its nonce; a router with a secret refuses it with a nonce of its own. The second call
carries the proof over both, and the router's proof comes back in its initial metadata. A router's nonce is good for
one call within NONCE_LIFE_S.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import grpc
import structlog

from pdserve.clock import Clock
from pdserve.ids import Random, WorkerRef
from pdserve.service.secret import Unauthenticated, draw_nonce, prove, proves

WORKER_KEY = "pdserve-worker"
EPOCH_KEY = "pdserve-epoch"
ROUTER_KEY = "pdserve-router"
NONCE_KEY = "pdserve-nonce-bin"
CHALLENGE_KEY = "pdserve-challenge-bin"
PROOF_KEY = "pdserve-proof-bin"

NONCE_LIFE_S = 10.0
MAX_NONCES = 1024

Metadata = tuple[tuple[str, str | bytes], ...]

log = structlog.get_logger()


class RouterGuard:
    """The router's side; lets everyone in if there is no secret. Event-loop thread only."""

    def __init__(self, router_id: str, secret: bytes | None, clock: Clock, random: Random) -> None:
        self._router_id = router_id
        self._secret = secret
        self._clock = clock
        self._random = random
        self._challenges: OrderedDict[bytes, float] = OrderedDict()  # nonce → end of its life

    async def admit(self, context: Any) -> None:
        """Check the call and send the initial metadata. Aborts the call as UNAUTHENTICATED."""
        told = read_metadata(context.invocation_metadata())
        answer: Metadata = ((ROUTER_KEY, self._router_id),)
        if self._secret is not None:
            nonce = _octets(told.get(NONCE_KEY))
            if PROOF_KEY not in told:
                reason = "prove the cluster secret: this router has cluster.secret_file set"
                challenge = ((CHALLENGE_KEY, self.challenge()),)
                if not nonce:  # a worker without a secret; one that has it knocks like this first
                    log.warning("session.refused", peer=context.peer(), reason=reason)
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, reason, challenge)
            who = (str(told.get(WORKER_KEY, "")), str(told.get(EPOCH_KEY, "")))
            challenge_nonce = _octets(told.get(CHALLENGE_KEY))
            known = self.spend(challenge_nonce)
            if not known or not proves(
                _octets(told[PROOF_KEY]), self._secret, "worker", nonce, challenge_nonce, *who
            ):
                reason = "the cluster secret of this worker is another" if known else "the nonce is not live"
                log.warning("session.refused", peer=context.peer(), worker=who[0], reason=reason)
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, reason)
            proof = prove(self._secret, "router", nonce, challenge_nonce, self._router_id, *who)
            answer = (*answer, (PROOF_KEY, proof))
        await context.send_initial_metadata(answer)

    def challenge(self) -> bytes:
        """A nonce for one call."""
        while len(self._challenges) >= MAX_NONCES:
            self._challenges.popitem(last=False)
        nonce = draw_nonce(self._random)
        self._challenges[nonce] = self._clock.now_s() + NONCE_LIFE_S
        return nonce

    def spend(self, nonce: bytes) -> bool:
        """Whether this nonce was given out, not long ago, and not used."""
        return self._challenges.pop(nonce, 0.0) >= self._clock.now_s()


class WorkerProof:
    """The worker's side: metadata for its calls, and the check of the router's answer."""

    def __init__(self, worker: WorkerRef, secret: bytes | None, random: Random) -> None:
        self._who = (worker.id, str(worker.epoch))
        self._secret = secret
        self._nonce = draw_nonce(random) if secret is not None else b""

    def knock(self) -> Metadata:
        """Metadata of the first call."""
        named: Metadata = ((WORKER_KEY, self._who[0]), (EPOCH_KEY, self._who[1]))
        return (*named, (NONCE_KEY, self._nonce)) if self._secret is not None else named

    def answer(self, challenge: bytes) -> Metadata | None:
        """Metadata of the second call; None if there is no secret to prove."""
        if self._secret is None or not challenge:
            return None
        proof = prove(self._secret, "worker", self._nonce, challenge, *self._who)
        return (*self.knock(), (CHALLENGE_KEY, challenge), (PROOF_KEY, proof))

    def check_router(self, initial: Any, challenge: bytes, address: str) -> None:
        """Raises Unauthenticated if this worker has a secret and the router did not prove it."""
        if self._secret is None:
            return
        told = read_metadata(initial)
        router_id = str(told.get(ROUTER_KEY, ""))
        proof = _octets(told.get(PROOF_KEY))
        if not challenge or not proves(
            proof, self._secret, "router", self._nonce, challenge, router_id, *self._who
        ):
            raise Unauthenticated(
                "the router can't prove the cluster secret", router=router_id, address=address
            )


def read_metadata(metadata: Iterable[Any] | None) -> dict[str, str | bytes]:
    """Call metadata by key; the last of a key counts."""
    return {str(key): value for key, value in metadata or ()}


def challenge_of(trailing: Iterable[Any] | None) -> bytes:
    """The router's nonce in a refusal, or nothing."""
    return _octets(read_metadata(trailing).get(CHALLENGE_KEY))


def _octets(value: str | bytes | None) -> bytes:
    return value if isinstance(value, bytes) else b""
