"""HELLO and PROOF: who the two ends are, whether they fit, and that both know the cluster's secret.

    P                                   D
    | HELLO{P, D, generation, facts} -> |  right D?
    | <- HELLO{D, P, generation, facts} |
    | PROOF{hmac} --------------------> |  proof right? facts agree? an older link of the pair is replaced; up
    | <-------------------- PROOF{hmac} |  proof right? facts agree?
    | MEMORY + descriptor ------------> |  where both prefer memfd and the connection can pass it: mapped
    | <----------------- MAPPED{reason} |  "" = D reads P's pool itself; else the stream is used, or the link ends
    up

P counts the link as up only when D already does: a grant that names P then never finds D without the link. What the
other says counts, and why it is refused is told to it, only once it is proven.
"""

from __future__ import annotations

import hashlib
import hmac
from enum import Enum

from kv_transfer.frames import NONCE_BYTES, PROOF_BYTES, LinkHello, Proof
from kv_transfer.link_facts import (
    LinkFacts,
    agree,
    breaks_determinism,
    common_checksum,
    common_transports,
)
from pdserve.errors import Stale, Unauthenticated
from pdserve.ids import Random, WorkerRef


class Side(Enum):
    """Which end of a link this is."""

    PREFILL = "prefill"
    DECODE = "decode"


class Handshake:
    """One side of one handshake; pure values in and out.

    theirs          what the other claims, until its proof is accepted
    wire, checksum  what both speak, and what pieces carry; known when the facts were compared
    transports      what both offer, the preferred first; the same
    """

    def __init__(
        self,
        *,
        side: Side,
        me: WorkerRef,
        facts: LinkFacts,
        num_blocks: int,
        secret: bytes | None,
        random: Random,
    ) -> None:
        self.side = side
        self.theirs: LinkHello | None = None
        self.wire = facts.wire
        self.checksum: str | None = None
        self.transports: tuple[str, ...] = ()
        self._me = me
        self.facts = facts
        self._num_blocks = num_blocks
        self._secret = secret
        self._nonce = random.getrandbits(NONCE_BYTES * 8).to_bytes(NONCE_BYTES, "little")

    @property
    def _other(self) -> Side:
        return Side.DECODE if self.side is Side.PREFILL else Side.PREFILL

    def hello(self, receiver: WorkerRef, generation: int) -> LinkHello:
        """What this side says first."""
        return LinkHello.of(
            self._me,
            receiver,
            self.facts,
            generation=generation,
            num_blocks=self._num_blocks,
            nonce=self._nonce,
            secret=self._secret is not None,
        )

    def accept_hello(self, hello: LinkHello, *, expected: WorkerRef | None) -> None:
        """Check the other's HELLO. expected: whom P dialled; None at D.

        Raises Stale (another incarnation is meant, or answered), or at P Unauthenticated if only one of both has a
        secret: D's HELLO comes second, so P is who can tell.
        """
        self.theirs = hello
        if hello.receiver != self._me:
            raise Stale("HELLO for another worker or epoch", wanted=hello.receiver, here=self._me)
        if expected is not None and hello.sender != expected:
            raise Stale("HELLO of another worker or epoch", wanted=expected, here=hello.sender)
        if self.side is Side.PREFILL and hello.secret != (self._secret is not None):
            words = ("not set", "set") if hello.secret else ("set", "not set")
            raise _not_proven(prefill=words[0], decode=words[1])

    def compare_facts(self) -> None:
        """What both speak, once the other is proven. Raises Incompatible (the field and both values)."""
        assert self.theirs is not None
        if self.side is Side.PREFILL:
            prefill, decode = self.facts, self.theirs.facts
        else:
            prefill, decode = self.theirs.facts, self.facts
        self.wire = agree(prefill=prefill, decode=decode)
        self.checksum = common_checksum(prefill=prefill, decode=decode)
        self.transports = common_transports(prefill=prefill, decode=decode)

    @property
    def different_numerics(self) -> dict[str, str]:
        """Of both ends, if somebody promises equal bits that they keep this pair from; else empty."""
        assert self.theirs is not None
        mine, theirs = self.facts, self.theirs.facts
        if not breaks_determinism(mine, theirs):
            return {}
        return {"mine": mine.numerics, "theirs": theirs.numerics}

    def proof(self) -> Proof:
        """This side's answer to the other's nonce."""
        return Proof(self._mac(self.side))

    def accept_proof(self, proof: Proof) -> None:
        """Raises Unauthenticated if the other doesn't know the secret."""
        if not hmac.compare_digest(self._mac(self._other), proof.proof):
            raise _not_proven(prefill="one secret", decode="another")

    def _mac(self, role: Side) -> bytes:
        """HMAC-SHA256(secret, role ‖ both nonces ‖ ids ‖ epochs), P's before D's; protocol.md, "Values"."""
        assert self.theirs is not None
        if self._secret is None:
            return bytes(PROOF_BYTES)
        mine, theirs = (self._me, self._nonce), (self.theirs.sender, self.theirs.nonce)
        prefill, decode = (mine, theirs) if self.side is Side.PREFILL else (theirs, mine)
        parts = [role.value.encode(), prefill[1], decode[1]]
        for ref, _nonce in (prefill, decode):
            worker_id = ref.id.encode()
            parts += [len(worker_id).to_bytes(4, "little"), worker_id]
        for ref, _nonce in (prefill, decode):
            parts += [ref.epoch.start_ns.to_bytes(16, "little"), ref.epoch.nonce.to_bytes(16, "little")]
        return hmac.new(self._secret, b"".join(parts), hashlib.sha256).digest()


def _not_proven(*, prefill: str, decode: str) -> Unauthenticated:
    return Unauthenticated(
        "workers of a pair don't know the same secret",
        field="cluster.secret_file",
        prefill=prefill,
        decode=decode,
    )
