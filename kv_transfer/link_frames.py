"""Frames about the link itself: handshake (HELLO, PROOF), its end (BYE), its life (PING, PONG)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from kv_transfer.facts import LinkFacts
from kv_transfer.fields import U32, Fields
from kv_transfer.kind import Kind, failure_body, parse_failure
from pdserve.errors import Failure
from pdserve.ids import Epoch, WorkerRef

NONCE_BYTES = 32
PROOF_BYTES = 32
_MAX_TEXT = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Who speaks, whom it means, and what must fit. secret: whether the speaker has a cluster secret."""

    kind: ClassVar[Kind] = Kind.HELLO
    sender: WorkerRef
    receiver: WorkerRef
    generation: int
    facts: LinkFacts
    num_blocks: int
    nonce: bytes
    secret: bool

    def body(self) -> dict[str, object]:
        facts = self.facts
        return {
            "wire": list(facts.wire),
            "sender": _ref_body(self.sender),
            "receiver": _ref_body(self.receiver),
            "generation": self.generation,
            "layout": facts.layout_json,
            "weights": facts.weights_fingerprint,
            "tokenizer": facts.tokenizer_fingerprint,
            "numerics": facts.numerics,
            "deterministic": facts.deterministic,
            "state_kinds": list(facts.state_kinds),
            "tp_rank": facts.tp_rank,
            "tp_size": facts.tp_size,
            "checksum": facts.checksum,
            "role_generation": facts.role_generation,
            "num_blocks": self.num_blocks,
            "nonce": self.nonce,
            "secret": self.secret,
        }

    @classmethod
    def parse(cls, fields: Fields) -> Self:
        wire = fields.numbers("wire", max_items=2)
        if len(wire) != 2:
            raise fields.malformed("wire", "(major, minor)", wire)
        facts = LinkFacts(
            wire=(wire[0], wire[1]),
            layout_json=fields.text("layout", max_chars=_MAX_TEXT),
            weights_fingerprint=fields.text("weights", max_chars=256),
            tokenizer_fingerprint=fields.text("tokenizer", max_chars=256),
            numerics=fields.text("numerics", max_chars=_MAX_TEXT),
            deterministic=fields.flag("deterministic"),
            state_kinds=fields.texts("state_kinds", max_items=16, max_chars=64),
            tp_rank=fields.number("tp_rank", high=U32),
            tp_size=fields.number("tp_size", high=U32),
            checksum=fields.text("checksum", max_chars=64),
            role_generation=fields.number("role_generation"),
        )
        return cls(
            sender=_parse_ref(fields, "sender"),
            receiver=_parse_ref(fields, "receiver"),
            generation=fields.number("generation", high=U32),
            facts=facts,
            num_blocks=fields.number("num_blocks", high=U32),
            nonce=fields.raw("nonce", num_bytes=NONCE_BYTES),
            secret=fields.flag("secret"),
        )


@dataclass(frozen=True, slots=True)
class Proof:
    """The answer to the other's nonce; zeros where no secret is set. D's says besides that the link is up."""

    kind: ClassVar[Kind] = Kind.PROOF
    proof: bytes

    def body(self) -> dict[str, object]:
        return {"proof": self.proof}

    @classmethod
    def parse(cls, fields: Fields) -> Self:
        return cls(fields.raw("proof", num_bytes=PROOF_BYTES))


@dataclass(frozen=True, slots=True)
class Bye:
    """This side ends the link, for this reason."""

    kind: ClassVar[Kind] = Kind.BYE
    failure: Failure

    def body(self) -> dict[str, object]:
        return failure_body(self.failure)

    @classmethod
    def parse(cls, fields: Fields) -> Self:
        return cls(parse_failure(fields))


@dataclass(frozen=True, slots=True)
class Ping:
    """Sent when nothing else was for keepalive_s."""

    kind: ClassVar[Kind] = Kind.PING

    def body(self) -> dict[str, object]:
        return {}

    @classmethod
    def parse(cls, _fields: Fields) -> Self:
        return cls()


@dataclass(frozen=True, slots=True)
class Pong:
    """Answer to PING."""

    kind: ClassVar[Kind] = Kind.PONG

    def body(self) -> dict[str, object]:
        return {}

    @classmethod
    def parse(cls, _fields: Fields) -> Self:
        return cls()


def _ref_body(ref: WorkerRef) -> list[object]:
    return [ref.id, ref.epoch.start_ns, ref.epoch.nonce]


def _parse_ref(fields: Fields, name: str) -> WorkerRef:
    worker_id, start_ns, nonce = fields.mixed(name, width=3)
    if not isinstance(worker_id, str) or not 0 < len(worker_id) <= 256:
        raise fields.malformed(name, "a worker id of 1..256 characters", worker_id)
    for value in (start_ns, nonce):
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise fields.malformed(name, "an epoch of two integers", value)
    assert isinstance(start_ns, int) and isinstance(nonce, int)
    return WorkerRef(worker_id, Epoch(start_ns, nonce))
