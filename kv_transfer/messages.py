"""What the engine owner and the transfer owner say to each other, and what the loop orders of links.

Every lease gets exactly one closing event at each end. At the prefill worker: `LeaseClosed` (confirmed or with an
error). At the decode worker: `HandedOff`, or `Retired` with an error. Only after it may the engine move the lease's
blocks: until then the transfer owner may still read (P) or write (D) them.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.errors import PdserveError
from pdserve.ids import NAMELESS, AttemptName, WorkerRef
from pdserve.sampling import TokenLogprobs

# --- loop -> transfer (prefill worker): links


@dataclass(frozen=True, slots=True)
class OrderLink:
    """A router session wants the link to this decode worker; equal orders join."""

    session_id: int
    decode_worker: WorkerRef
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CancelLink:
    """That session no longer wants the link."""

    session_id: int
    decode_worker: WorkerRef


@dataclass(frozen=True, slots=True)
class CancelAllLinks:
    """The session has ended: an Unpair of all it ordered."""

    session_id: int


# --- transfer -> loop


@dataclass(frozen=True, slots=True)
class LinkState:
    """The state of a link, for every session that ordered it (and, `session_id` set, for one that joins)."""

    decode_worker: WorkerRef
    up: bool
    transport: str
    reason: str
    generation: int
    session_id: int | None = None


# --- engine -> transfer, prefill worker


@dataclass(frozen=True, slots=True)
class OpenLease:
    """The attempt of this lease is accepted: from now on either side may end it, and LeaseClosed follows.

    num_blocks  blocks of the prompt in all; the first num_skip stay unsent
    """

    lease_id: int
    decode_worker: WorkerRef
    num_blocks: int
    num_skip: int
    name: AttemptName = NAMELESS


@dataclass(frozen=True, slots=True)
class Offer:
    """The KV of the sequence's first `upto` blocks is complete.

    block_ids  those from the last offer's upto on; at first from num_skip on
    """

    lease_id: int
    upto: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CommitLease:
    """All blocks are offered and the first token is sampled."""

    lease_id: int
    first_token: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class WithdrawLease:
    """The prefill worker gives the lease up; D is told; answered by LeaseClosed, unless that is on its way already."""

    lease_id: int
    error: PdserveError


# --- transfer -> engine, prefill worker


@dataclass(frozen=True, slots=True)
class LeaseClosed:
    """The transfer owner no longer reads this lease's blocks. error None: confirmed."""

    lease_id: int
    error: PdserveError | None
    sent_bytes: int
    link_lost: bool


# --- engine -> transfer, decode worker


@dataclass(frozen=True, slots=True)
class ExpectLease:
    """A grant: `source` will offer the blocks of a sequence from num_skip on, as many as there are block_ids.

    block_ids  the decode worker's, which they go into, in order
    """

    lease_id: int
    source: WorkerRef
    num_skip: int
    block_ids: tuple[int, ...]
    name: AttemptName = NAMELESS


@dataclass(frozen=True, slots=True)
class EndLease:
    """The decode worker ends the lease (abort, revoked, drain); P is told FAIL; answered by Retired.

    After HandedOff it is no error and isn't answered.
    """

    lease_id: int
    error: PdserveError


# --- transfer -> engine, decode worker


@dataclass(frozen=True, slots=True)
class PullProgress:
    """Blocks of the lease received so far, and looks at which its link moved for others; sent when one has grown."""

    lease_id: int
    num_received: int
    num_waits: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedOff:
    """CONFIRM came: every expected block was written exactly once and is proven right. The lease is over.

    confirmed_s  when it was read, by the worker's clock; None = now. The engine's step in between is waiting, too.
    begun_s      when the first block was asked for; None = nothing was to come
    """

    lease_id: int
    first_token: int
    logprobs: TokenLogprobs | None
    received_bytes: int
    transport: str
    transfer_s: float
    transfer_exposed_s: float
    commit_s: float
    confirmed_s: float | None = None
    begun_s: float | None = None


@dataclass(frozen=True, slots=True)
class Retired:
    """The lease ended without a hand-off; nothing more will be written into its blocks.

    quarantine: a device copy or one-sided read may still touch them; `LeaseReleased` follows.
    """

    lease_id: int
    error: PdserveError
    quarantine: bool = False


@dataclass(frozen=True, slots=True)
class LeaseReleased:
    """The quarantined blocks of this lease are safe now (either worker)."""

    lease_id: int


# --- engine -> loop and back are session messages: see pdserve.worker
