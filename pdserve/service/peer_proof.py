"""Who may open a session: the cluster secret proven by both sides in the metadata of the call.

A worker's first call carries its nonce; a router with a secret refuses it with a nonce of its own. The second call
carries the proof over both, and the router's proof comes back in its initial metadata. A router's nonce is good for
one call within NONCE_LIFE_S; the router keeps nothing of it before the proof, so however many strangers knock, whoever
knows the secret gets in. Strangers are told nothing but that they aren't known.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from typing import Any

import grpc
import structlog

from pdserve.clock import Clock
from pdserve.errors import Unauthenticated
from pdserve.ids import Random, WorkerRef
from pdserve.service.secret import draw_nonce, prove, proves

WORKER_KEY = "pdserve-worker"
EPOCH_KEY = "pdserve-epoch"
ROUTER_KEY = "pdserve-router"
NONCE_KEY = "pdserve-nonce-bin"
CHALLENGE_KEY = "pdserve-challenge-bin"
PROOF_KEY = "pdserve-proof-bin"

NONCE_LIFE_S = 10.0
_TIME_BYTES = 8
_DRAWN_BYTES = 8
_REFUSED = "not known here"

Metadata = tuple[tuple[str, str | bytes], ...]

log = structlog.get_logger()


class RouterGuard:
    """The router's side; lets everyone in if there is no secret. Event-loop thread only."""

    def __init__(self, router_id: str, secret: bytes | None, clock: Clock, random: Random) -> None:
        self._router_id = router_id
        self._secret = secret
        self._clock = clock
        self._random = random
        self._stamp_key = draw_nonce(random)
        self._spent: dict[bytes, float] = {}  # nonce → end of its life

    async def admit(self, context: Any) -> None:
        """Check the call and send the initial metadata. Aborts the call as UNAUTHENTICATED."""
        told = read_metadata(context.invocation_metadata())
        answer: Metadata = ((ROUTER_KEY, self._router_id),)
        if self._secret is not None:
            nonce = _octets(told.get(NONCE_KEY))
            if PROOF_KEY not in told:
                if not nonce:  # a worker without a secret; one that has it knocks like this first
                    log.warning("session.refused", peer=context.peer(), reason="it has no secret to prove")
                await context.abort(
                    grpc.StatusCode.UNAUTHENTICATED, _REFUSED, ((CHALLENGE_KEY, self.challenge()),)
                )
            who = (str(told.get(WORKER_KEY, "")), str(told.get(EPOCH_KEY, "")))
            challenge = _octets(told.get(CHALLENGE_KEY))
            proof = _octets(told[PROOF_KEY])
            is_right = proves(proof, self._secret, "worker", nonce, challenge, *who)
            if not is_right or not self.spend(challenge):
                reason = "the nonce is not live" if is_right else "its secret is another"
                log.warning("session.refused", peer=context.peer(), reason=reason)
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, _REFUSED)
            mine = prove(self._secret, "router", nonce, challenge, self._router_id, *who)
            answer = (*answer, (PROOF_KEY, mine))
        await context.send_initial_metadata(answer)

    def challenge(self) -> bytes:
        """A nonce for one call: the end of its life, random bytes, and the stamp by which it is known again."""
        ends_ms = round((self._clock.now_s() + NONCE_LIFE_S) * 1000)
        drawn = self._random.getrandbits(8 * _DRAWN_BYTES).to_bytes(_DRAWN_BYTES, "little")
        body = ends_ms.to_bytes(_TIME_BYTES, "little") + drawn
        return body + self._stamp(body)

    def spend(self, nonce: bytes) -> bool:
        """Whether this nonce was given out here, not long ago, and not spent before. Call it for a right proof only."""
        body, stamp = nonce[: _TIME_BYTES + _DRAWN_BYTES], nonce[_TIME_BYTES + _DRAWN_BYTES :]
        if not hmac.compare_digest(stamp, self._stamp(body)):
            return False
        now_s, ends_s = self._clock.now_s(), int.from_bytes(body[:_TIME_BYTES], "little") / 1000
        self._spent = {each: until_s for each, until_s in self._spent.items() if until_s >= now_s}
        if ends_s < now_s or nonce in self._spent:
            return False
        self._spent[nonce] = ends_s
        return True

    def _stamp(self, body: bytes) -> bytes:
        return hashlib.blake2b(body, key=self._stamp_key, digest_size=16).digest()


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

    def explain(self, refusal: Unauthenticated) -> Unauthenticated:
        """A router's refusal, which says nothing, in words for this side's operator."""
        if self._secret is None:
            hint = "the router wants cluster.secret_file proven, which isn't set here"
        else:
            hint = "the router doesn't accept the proof: is its cluster.secret_file another?"
        return Unauthenticated(hint, target=refusal.fields.get("target", ""))

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
