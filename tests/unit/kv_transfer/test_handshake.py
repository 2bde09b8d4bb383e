"""Handshake values: who is meant, what must agree, and the proof of the secret."""

from __future__ import annotations

import hashlib
import hmac
import random
from dataclasses import replace

import pytest

from kv_transfer.frames import Proof
from kv_transfer.handshake import Handshake, Side
from kv_transfer.link_facts import LinkFacts, agree, breaks_determinism
from pdserve.errors import Stale, Unauthenticated
from pdserve.ids import Epoch, WorkerRef

P = WorkerRef("prefill-1", Epoch(10, 20))
D = WorkerRef("dé-2", Epoch(30, 40))
FACTS = LinkFacts(layout_json="l", weights_fingerprint="w", tokenizer_fingerprint="t", numerics="n")
SECRET = bytes(range(32))


def _pair(secret: bytes | None = SECRET) -> tuple[Handshake, Handshake]:
    draw = random.Random(3)
    prefill, decode = (
        Handshake(side=side, me=me, facts=FACTS, num_blocks=9, secret=secret, random=draw)
        for side, me in ((Side.PREFILL, P), (Side.DECODE, D))
    )
    decode.accept_hello(prefill.hello(D, 1), expected=None)
    prefill.accept_hello(decode.hello(P, 1), expected=D)
    return prefill, decode


def test_each_accepts_the_others_proof() -> None:
    prefill, decode = _pair()
    decode.accept_proof(prefill.proof())
    prefill.accept_proof(decode.proof())


def test_the_proof_is_the_documented_value() -> None:
    prefill, decode = _pair()
    assert prefill.theirs is not None and decode.theirs is not None
    parts = b"prefill" + decode.theirs.nonce + prefill.theirs.nonce
    parts += (9).to_bytes(4, "little") + b"prefill-1" + (5).to_bytes(4, "little") + "dé-2".encode()
    parts += b"".join(value.to_bytes(16, "little") for value in (10, 20, 30, 40))
    assert prefill.proof().proof == hmac.new(SECRET, parts, hashlib.sha256).digest()


def test_a_proof_sent_back_is_no_proof() -> None:
    prefill, decode = _pair()
    with pytest.raises(Unauthenticated, match=r"cluster\.secret_file"):
        decode.accept_proof(decode.proof())
    with pytest.raises(Unauthenticated):
        prefill.accept_proof(Proof(bytes(32)))


def test_nonces_are_drawn_anew() -> None:
    draw = random.Random(3)
    hellos = [
        Handshake(side=Side.PREFILL, me=P, facts=FACTS, num_blocks=9, secret=None, random=draw).hello(D, 1)
        for _ in range(2)
    ]
    assert hellos[0].nonce != hellos[1].nonce


@pytest.mark.parametrize("other", [WorkerRef("dé-2", Epoch(30, 41)), WorkerRef("x", Epoch(30, 40))])
def test_hello_for_or_of_somebody_else_is_stale(other: WorkerRef) -> None:
    prefill, decode = _pair()
    with pytest.raises(Stale):
        decode.accept_hello(prefill.hello(other, 1), expected=None)
    with pytest.raises(Stale):
        prefill.accept_hello(decode.hello(P, 1), expected=other)


def test_the_lower_minor_is_spoken() -> None:
    newer = replace(FACTS, wire=(FACTS.wire[0], FACTS.wire[1] + 3))
    assert agree(prefill=FACTS, decode=newer) == agree(prefill=newer, decode=FACTS) == FACTS.wire


@pytest.mark.parametrize(
    ("one", "other", "is_broken"),
    [(True, True, False), (True, False, True), (False, False, False)],
)
def test_determinism_needs_both(one: bool, other: bool, is_broken: bool) -> None:
    left, right = replace(FACTS, deterministic=one), replace(FACTS, deterministic=other)
    assert breaks_determinism(left, right) is is_broken
    assert breaks_determinism(left, replace(right, numerics="m")) is (one or other)
