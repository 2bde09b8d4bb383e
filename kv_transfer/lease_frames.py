"""Frames about one lease: P offers and commits, D pulls and acknowledges; either may give the lease up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from kv_transfer.fields import U32, Fields
from kv_transfer.kind import Kind, failure_body, parse_failure
from pdserve.errors import Failure
from pdserve.messages import TokenLogprobs

MAX_PIECE_BYTES = 4 << 20
MAX_PULLED_PIECES = 256
"""Pieces of one PULL."""
MAX_READY_IDS = 4096
"""Block ids of one READY (one-sided transports)."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The KV of the sequence's first `upto` blocks is complete.

    block_ids  one-sided transports only: P's ids of the newly offered blocks, upto − len … upto − 1
    """

    kind: ClassVar[Kind] = Kind.READY
    lease_id: int
    upto: int
    block_ids: tuple[int, ...] = ()

    def body(self) -> dict[str, object]:
        return {"lease": self.lease_id, "upto": self.upto, "block_ids": list(self.block_ids)}

    @classmethod
    def parse(cls, fields: Fields) -> Self:
        upto = fields.number("upto", high=U32)
        block_ids = fields.numbers("block_ids", max_items=MAX_READY_IDS)
        if len(block_ids) > upto:
            raise fields.malformed("block_ids", f"at most upto = {upto}", len(block_ids))
        return cls(fields.number("lease"), upto, block_ids)


@dataclass(frozen=True, slots=True)
class PulledPiece:
    """A run of bytes inside one block. tag: names this asking, never reused on the link; block: sequence index."""

    tag: int
    block: int
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Pull:
    """D asks for pieces of offered blocks."""

    kind: ClassVar[Kind] = Kind.PULL
    lease_id: int
    pieces: tuple[PulledPiece, ...]

    def body(self) -> dict[str, object]:
        rows = [[piece.tag, piece.block, piece.offset, piece.num_bytes] for piece in self.pieces]
        return {"lease": self.lease_id, "pieces": rows}

    @classmethod
    def parse(cls, fields: Fields) -> Self:
        rows = fields.rows("pieces", max_rows=MAX_PULLED_PIECES, width=4)
        pieces = tuple(PulledPiece(*row) for row in rows)
        for piece in pieces:
            if not 0 < piece.num_bytes <= MAX_PIECE_BYTES:
                raise fields.malformed("pieces", f"1..{MAX_PIECE_BYTES} bytes each", piece.num_bytes)
        return cls(fields.number("lease"), pieces)


@dataclass(frozen=True, slots=True)
class Data:
    """Head of one piece, whose raw bytes follow. checksum: xxh3_64 of them."""

    kind: ClassVar[Kind] = Kind.DATA
    lease_id: int
    tag: int
    checksum: int

    def body(self) -> dict[str, object]:
        return {"lease": self.lease_id, "tag": self.tag, "sum": self.checksum}

    @classmethod
    def parse(cls, fields: Fields) -> Self:
        return cls(fields.number("lease"), fields.number("tag"), fields.number("sum"))


@dataclass(frozen=True, slots=True)
class Commit:
    """All blocks are offered. num_blocks: how many D must have got; may overtake the last pulls."""

    kind: ClassVar[Kind] = Kind.COMMIT
    lease_id: int
    num_blocks: int
    first_token: int
    logprobs: TokenLogprobs | None

    def body(self) -> dict[str, object]:
        body: dict[str, object] = {
            "lease": self.lease_id,
            "num_blocks": self.num_blocks,
            "first_token": self.first_token,
            "logprob": None,
        }
        if self.logprobs is not None:
            body["logprob"] = self.logprobs.logprob
            body["top"] = [list(pair) for pair in self.logprobs.top]
        return body

    @classmethod
    def parse(cls, fields: Fields) -> Self:
        logprobs = None
        if not fields.is_none("logprob"):
            logprobs = TokenLogprobs(fields.real("logprob"), fields.pairs("top", max_items=1024))
        return cls(
            fields.number("lease"),
            fields.number("num_blocks", high=U32),
            fields.number("first_token", high=U32),
            logprobs,
        )


@dataclass(frozen=True, slots=True)
class _LeaseOnly:
    """The body of a frame that says nothing but which lease it is about."""

    lease_id: int

    def body(self) -> dict[str, object]:
        return {"lease": self.lease_id}

    @classmethod
    def parse(cls, fields: Fields) -> Self:
        return cls(fields.number("lease"))


@dataclass(frozen=True, slots=True)
class Ack(_LeaseOnly):
    """D has every expected block, each written exactly once."""

    kind: ClassVar[Kind] = Kind.ACK


@dataclass(frozen=True, slots=True)
class Confirm(_LeaseOnly):
    """P has held every offered block from its READY to now: what D read is the right KV."""

    kind: ClassVar[Kind] = Kind.CONFIRM


@dataclass(frozen=True, slots=True)
class Released(_LeaseOnly):
    """D will not read this lease's blocks again (one-sided transports)."""

    kind: ClassVar[Kind] = Kind.RELEASED


@dataclass(frozen=True, slots=True)
class _GivenUp:
    """The body of a frame that ends a lease with an error."""

    lease_id: int
    failure: Failure

    def body(self) -> dict[str, object]:
        return {"lease": self.lease_id, **failure_body(self.failure)}

    @classmethod
    def parse(cls, fields: Fields) -> Self:
        return cls(fields.number("lease"), parse_failure(fields))


@dataclass(frozen=True, slots=True)
class Withdraw(_GivenUp):
    """P gives the lease up."""

    kind: ClassVar[Kind] = Kind.WITHDRAW


@dataclass(frozen=True, slots=True)
class Fail(_GivenUp):
    """D gives the lease up."""

    kind: ClassVar[Kind] = Kind.FAIL


@dataclass(frozen=True, slots=True)
class Stale:
    """A frame of kind `of` named a lease (or a generation) that isn't live here. Never answered itself."""

    kind: ClassVar[Kind] = Kind.STALE
    lease_id: int
    of: int

    def body(self) -> dict[str, object]:
        return {"lease": self.lease_id, "of": self.of}

    @classmethod
    def parse(cls, fields: Fields) -> Self:
        return cls(fields.number("lease"), fields.number("of", high=255))
