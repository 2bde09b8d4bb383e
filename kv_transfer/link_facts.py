"""What two ends of a link must agree on, and the comparison that names the first field in which they don't."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.errors import Incompatible
from pdserve.kv_memory import XXH3_64
from pdserve.wire_version import WIRE_VERSION, WireVersion, text

STREAM = "stream"
_PASSES_MEMORY = (1, 1)
"""The first wire version with MEMORY and MAPPED."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFacts:
    """One worker's side of the comparison, said in HELLO.

    layout_json  named dims and strides (KvLayout.wire_json), without the pool's size
    checksums    kinds of checksums that this side's memory can compute, the best first; None: a peer of minor 0, which
                 knows `checksum` alone, and insists on it
    transports   those that this side offers, the preferred first; None: a peer of minor 0, which knows streams alone
    state_kinds  what a hand-off carries
    numerics     workers of equal text give equal bits; a difference is logged, and only where `deterministic`
    """

    layout_json: str
    weights_fingerprint: str
    tokenizer_fingerprint: str
    numerics: str
    deterministic: bool = False
    state_kinds: tuple[str, ...] = ("kv",)
    tp_rank: int = 0
    tp_size: int = 1
    checksum: str = XXH3_64
    checksums: tuple[str, ...] | None = None
    transports: tuple[str, ...] | None = None
    wire: WireVersion = WIRE_VERSION
    role_generation: int = 0


_EQUAL = (
    "layout_json",
    "weights_fingerprint",
    "tokenizer_fingerprint",
    "state_kinds",
    "tp_rank",
    "tp_size",
)


def agree(*, prefill: LinkFacts, decode: LinkFacts) -> WireVersion:
    """The wire version that both speak. Raises Incompatible at the first field that differs."""
    if prefill.wire[0] != decode.wire[0]:
        raise misfit("wire", prefill=text(prefill.wire), decode=text(decode.wire))
    for name in _EQUAL:
        if getattr(prefill, name) != getattr(decode, name):
            raise misfit(name, prefill=getattr(prefill, name), decode=getattr(decode, name))
    return prefill.wire[0], min(prefill.wire[1], decode.wire[1])


def common_checksum(*, prefill: LinkFacts, decode: LinkFacts) -> str | None:
    """What pieces carry: P's best kind that D can check; None: nothing, the transport is trusted.

    Raises Incompatible if a peer of minor 0 insists on one that the other doesn't know.
    """
    kinds = _checksums(decode)
    common = next((kind for kind in _checksums(prefill) if kind in kinds), None)
    if common is None and None in (prefill.checksums, decode.checksums):
        raise misfit("checksum", prefill=prefill.checksum, decode=decode.checksum)
    return common


def common_transports(*, prefill: LinkFacts, decode: LinkFacts) -> tuple[str, ...]:
    """Those that both offer, in P's order, for the connection to choose from. Raises Incompatible if there is none."""
    mine, theirs = _transports(prefill), _transports(decode)
    common = tuple(kind for kind in mine if kind in theirs)
    if not common:
        raise misfit("transports", prefill=",".join(mine), decode=",".join(theirs))
    return tuple(
        kind for kind in common if kind == STREAM or min(prefill.wire, decode.wire) >= _PASSES_MEMORY
    )


def _transports(facts: LinkFacts) -> tuple[str, ...]:
    return (STREAM,) if facts.transports is None else facts.transports


def _checksums(facts: LinkFacts) -> tuple[str, ...]:
    return (facts.checksum,) if facts.checksums is None else facts.checksums


def breaks_determinism(one: LinkFacts, other: LinkFacts) -> bool:
    """Whether somebody promises equal bits that this pair can't keep."""
    if not (one.deterministic or other.deterministic):
        return False
    return one.numerics != other.numerics or one.deterministic != other.deterministic


def misfit(field: str, *, prefill: object, decode: object) -> Incompatible:
    """The same words at both ends: which field, and each worker's value."""
    return Incompatible("workers of a pair don't fit", field=field, prefill=prefill, decode=decode)
