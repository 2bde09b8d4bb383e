"""The frames of a link, each a msgpack map; what a field may hold is said in its type and checked as it is read.

Handshake: HELLO, PROOF (each side sends both), MEMORY (P), MAPPED (D), JOIN (D), JOINED (each). End: BYE.
Life: PING, PONG. P to D: READY, DATA, COMMIT, CONFIRM, WITHDRAW. D to P: PULL, ACK, RELEASED, FAIL. Both: STALE.
How they lie on the wire is in framing.py.
"""

from __future__ import annotations

from dataclasses import fields as fields_of
from enum import IntEnum
from typing import Annotated, Any, ClassVar, Self, get_args

from msgspec import UNSET, Meta, Struct, UnsetType

from kv_transfer.link_facts import LinkFacts
from pdserve.errors import Failure
from pdserve.ids import Epoch, WorkerRef
from pdserve.sampling import TokenLogprobs
from pdserve.wire_version import WireVersion

NONCE_BYTES = 32
PROOF_BYTES = 32
UNIQUE_ID_BYTES = 128
MAX_HANDLE_BYTES = 256
MAX_PIECE_BYTES = 4 << 20
MAX_PULLED_PIECES = 256
"""Pieces of one PULL."""
MAX_READY_IDS = 4096
"""Block ids of one READY (one-sided transports)."""

_MAX_ERROR_CHARS = 100
_MAX_MESSAGE_CHARS = 1000
_MAX_FIELDS = 16
_MAX_VALUE_CHARS = 512

U32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
U64 = Annotated[int, Meta(ge=0)]  # msgpack knows none above
Text = Annotated[str, Meta(max_length=4096)]
Name = Annotated[str, Meta(max_length=256)]
Word = Annotated[str, Meta(max_length=64)]
_Error = Annotated[str, Meta(max_length=_MAX_ERROR_CHARS)]
_Message = Annotated[str, Meta(max_length=_MAX_MESSAGE_CHARS)]
_Value = Annotated[str, Meta(max_length=_MAX_VALUE_CHARS)]
_Fields = Annotated[dict[_Value, _Value], Meta(max_length=_MAX_FIELDS)]
_Ref = tuple[Annotated[str, Meta(min_length=1, max_length=256)], U64, U64]


class Kind(IntEnum):
    """The kind of a frame, as in its header; 0 is refused."""

    HELLO = 1
    PROOF = 2
    BYE = 3
    PING = 4
    PONG = 5
    READY = 6
    PULL = 7
    DATA = 8
    COMMIT = 9
    ACK = 10
    CONFIRM = 11
    RELEASED = 12
    WITHDRAW = 13
    FAIL = 14
    STALE = 15
    MEMORY = 16
    MAPPED = 17
    JOIN = 18
    JOINED = 19


_WIRE_NAMES = {
    "lease_id": "lease",
    "layout_json": "layout",
    "weights_fingerprint": "weights",
    "tokenizer_fingerprint": "tokenizer",
    "sender_ref": "sender",
    "receiver_ref": "receiver",
}


class _Frame(Struct, frozen=True, rename=_WIRE_NAMES):
    """Fields lie in the map by their names, in this order."""

    kind: ClassVar[Kind]


# --- the link itself


class LinkHello(_Frame, frozen=True, kw_only=True):
    """Who speaks, whom it means, and what must fit (LinkFacts). secret: whether the speaker has a cluster secret."""

    kind: ClassVar[Kind] = Kind.HELLO
    wire: tuple[U32, U32]
    sender_ref: _Ref
    receiver_ref: _Ref
    generation: U32
    layout_json: Text
    weights_fingerprint: Name
    tokenizer_fingerprint: Name
    numerics: Text
    deterministic: bool
    state_kinds: Annotated[tuple[Word, ...], Meta(max_length=16)]
    tp_rank: U32
    tp_size: U32
    checksum: Word
    role_generation: U64
    num_blocks: U32
    nonce: Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
    secret: bool
    checksums: Annotated[tuple[Word, ...], Meta(max_length=16)] | UnsetType = UNSET
    transports: Annotated[tuple[Word, ...], Meta(max_length=16)] | UnsetType = UNSET

    @classmethod
    def of(cls, sender: WorkerRef, receiver: WorkerRef, facts: LinkFacts, **rest: Any) -> Self:
        """rest: generation, num_blocks, nonce, secret."""
        said: dict[str, Any] = {field.name: getattr(facts, field.name) for field in fields_of(facts)}
        absent = dict.fromkeys((name for name, value in said.items() if value is None), UNSET)
        return cls(sender_ref=_ref_to(sender), receiver_ref=_ref_to(receiver), **said | absent, **rest)

    @property
    def sender(self) -> WorkerRef:
        return _ref_from(self.sender_ref)

    @property
    def receiver(self) -> WorkerRef:
        return _ref_from(self.receiver_ref)

    @property
    def facts(self) -> LinkFacts:
        said: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields_of(LinkFacts)}
        absent = dict.fromkeys(name for name, value in said.items() if value is UNSET)
        return LinkFacts(**said | absent)


class Proof(_Frame, frozen=True):
    """The answer to the other's nonce; zeros where no secret is set. D's says besides that the link is up."""

    kind: ClassVar[Kind] = Kind.PROOF
    proof: Annotated[bytes, Meta(min_length=PROOF_BYTES, max_length=PROOF_BYTES)]


class Memory(_Frame, frozen=True):
    """P's pool, for D to read itself. handle: names it; none where what it takes travels beside this frame. Minor 1."""

    kind: ClassVar[Kind] = Kind.MEMORY
    handle: Annotated[bytes, Meta(max_length=MAX_HANDLE_BYTES)] | UnsetType = UNSET

    @classmethod
    def of(cls, handle: bytes) -> Self:
        return cls(handle or UNSET)


class Mapped(_Frame, frozen=True):
    """Answer to MEMORY. reason: why D can't read it; "" = it does. Minor 1."""

    kind: ClassVar[Kind] = Kind.MAPPED
    reason: Text = ""


class Join(_Frame, frozen=True):
    """D's communicator, for P to be the other rank of it; only to a P that is proven. "nccl" in both transports."""

    kind: ClassVar[Kind] = Kind.JOIN
    unique_id: Annotated[bytes, Meta(min_length=UNIQUE_ID_BYTES, max_length=UNIQUE_ID_BYTES)]


class Joined(_Frame, frozen=True):
    """What became of it: first P's word, then D's, which counts. reason: why pieces don't go over it; "" = they do."""

    kind: ClassVar[Kind] = Kind.JOINED
    reason: Text = ""


class Ping(_Frame, frozen=True):
    """Sent when nothing else was for keepalive_s. moves: D tells P how often payload came; minor 1."""

    kind: ClassVar[Kind] = Kind.PING
    moves: U64 | UnsetType = UNSET

    @classmethod
    def of(cls, moves: int, wire: WireVersion) -> Self:
        return cls(moves if wire >= (1, 1) else UNSET)


class Pong(_Frame, frozen=True):
    """Answer to PING."""

    kind: ClassVar[Kind] = Kind.PONG


# --- one lease: P offers and commits, D pulls and acknowledges


class _OfLease(_Frame, frozen=True):
    lease_id: U64


class Ready(_OfLease, frozen=True):
    """The KV of the sequence's first `upto` blocks is complete.

    block_ids  one-sided transports only: P's ids of the newly offered blocks, upto − len … upto − 1
    """

    kind: ClassVar[Kind] = Kind.READY
    upto: U32
    block_ids: Annotated[tuple[U32, ...], Meta(max_length=MAX_READY_IDS)] = ()

    def __post_init__(self) -> None:
        if len(self.block_ids) > self.upto:
            raise ValueError(f"more ids than upto = {self.upto} in field `block_ids`")


class PulledPiece(Struct, frozen=True, array_like=True):
    """A run of bytes inside one block. tag: names this asking, never reused on the link; block: sequence index."""

    tag: U64
    block: U64
    offset: U64
    num_bytes: Annotated[int, Meta(ge=1, le=MAX_PIECE_BYTES)]


class Pull(_OfLease, frozen=True):
    """D asks for pieces of offered blocks."""

    kind: ClassVar[Kind] = Kind.PULL
    pieces: Annotated[tuple[PulledPiece, ...], Meta(max_length=MAX_PULLED_PIECES)]


class Data(_OfLease, frozen=True, rename={**_WIRE_NAMES, "checksum": "sum"}):
    """Head of one piece, whose raw bytes follow. checksum: xxh3_64 of them."""

    kind: ClassVar[Kind] = Kind.DATA
    tag: U64
    checksum: U64


class Commit(_OfLease, frozen=True):
    """All blocks are offered. num_blocks: how many D must have got; may overtake the last pulls."""

    kind: ClassVar[Kind] = Kind.COMMIT
    num_blocks: U32
    first_token: U32
    logprob: float | None
    top: Annotated[tuple[tuple[U32, float], ...], Meta(max_length=1024)] | UnsetType = UNSET

    @classmethod
    def of(cls, lease_id: int, num_blocks: int, first_token: int, logprobs: TokenLogprobs | None) -> Self:
        if logprobs is None:
            return cls(lease_id, num_blocks, first_token, None)
        return cls(lease_id, num_blocks, first_token, logprobs.logprob, logprobs.top)

    def __post_init__(self) -> None:
        if self.logprob is not None and self.top is UNSET:
            raise ValueError("missing field `top`")

    @property
    def logprobs(self) -> TokenLogprobs | None:
        if self.logprob is None or isinstance(self.top, UnsetType):
            return None
        return TokenLogprobs(self.logprob, self.top)


class Ack(_OfLease, frozen=True):
    """D has every expected block, each written exactly once."""

    kind: ClassVar[Kind] = Kind.ACK


class Confirm(_OfLease, frozen=True):
    """P has held every offered block from its READY to now: what D read is the right KV."""

    kind: ClassVar[Kind] = Kind.CONFIRM


class Released(_OfLease, frozen=True):
    """D will not read this lease's blocks again (one-sided transports)."""

    kind: ClassVar[Kind] = Kind.RELEASED


class StaleLease(_OfLease, frozen=True):
    """A frame of kind `of` named a lease (or a generation) that isn't live here. Never answered itself."""

    kind: ClassVar[Kind] = Kind.STALE
    of: Annotated[int, Meta(ge=0, le=255)]

    @property
    def of_name(self) -> str:
        """Of that kind, which may be a later version's."""
        return next((kind.name for kind in Kind if kind == self.of), "UNKNOWN")


# --- ends, with an error: the writer cuts it to the bounds that the reader checks, a long reason must not end a link


class Bye(_Frame, frozen=True):
    """This side ends the link, for this reason."""

    kind: ClassVar[Kind] = Kind.BYE
    error: _Error
    message: _Message
    fields: _Fields

    @classmethod
    def of(cls, failure: Failure) -> Self:
        return cls(*_cut(failure))

    @property
    def failure(self) -> Failure:
        return Failure(self.error, self.message, self.fields)


class _GivenUp(_OfLease, frozen=True):
    error: _Error
    message: _Message
    fields: _Fields

    @classmethod
    def of(cls, lease_id: int, failure: Failure) -> Self:
        return cls(lease_id, *_cut(failure))

    @property
    def failure(self) -> Failure:
        return Failure(self.error, self.message, self.fields)


class Withdraw(_GivenUp, frozen=True):
    """P gives the lease up."""

    kind: ClassVar[Kind] = Kind.WITHDRAW


class Fail(_GivenUp, frozen=True):
    """D gives the lease up."""

    kind: ClassVar[Kind] = Kind.FAIL


Frame = (
    LinkHello
    | Proof
    | Bye
    | Ping
    | Pong
    | Ready
    | Pull
    | Data
    | Commit
    | Ack
    | Confirm
    | Released
    | Withdraw
    | Fail
    | StaleLease
    | Memory
    | Mapped
    | Join
    | Joined
)
HandshakeFrame = LinkHello | Proof | Memory | Mapped | Join | Joined
FRAME_CLASSES: dict[int, type[Frame]] = {int(cls.kind): cls for cls in get_args(Frame)}
"""By the kind in a header."""


def _cut(failure: Failure) -> tuple[str, str, dict[str, str]]:
    items = list(failure.fields.items())[:_MAX_FIELDS]
    cut = {name[:_MAX_VALUE_CHARS]: value[:_MAX_VALUE_CHARS] for name, value in items}
    return failure.error[:_MAX_ERROR_CHARS], failure.message[:_MAX_MESSAGE_CHARS], cut


def _ref_to(ref: WorkerRef) -> _Ref:
    return ref.id, ref.epoch.start_ns, ref.epoch.nonce


def _ref_from(ref: _Ref) -> WorkerRef:
    worker_id, start_ns, nonce = ref
    return WorkerRef(worker_id, Epoch(start_ns, nonce))
