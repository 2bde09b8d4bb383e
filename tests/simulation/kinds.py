"""The faults that a simulated cluster suffers, and the moments at which they are aimed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Moment(Enum):
    """The phase of a request. As the aim of a fault: some request on the victim must be in it."""

    ANY = "any"
    QUEUED = "queued"
    GRANTED = "granted"
    PULLING = "pulling"
    COMMITTED = "committed"
    STREAMING = "streaming"
    DRAINING = "draining"


PHASES = tuple(moment for moment in Moment if moment is not Moment.ANY)


class Kind(Enum):
    """A fault; the rows of docs/reliability.md that it belongs to stand in coverage.py."""

    CANCEL = "client cancels"
    DEAF_CLIENT = "client stops reading"
    KILL_PREFILL = "kill prefill"
    KILL_DECODE = "kill decode"
    KILL_UNHEARD = "kill a prefill worker whose first token is not at the router"
    CUT_LINK = "cut link"
    LINK_DIES = "link dies"
    NOISY_LINK = "noisy link"
    STOP_PREFILL = "stop prefill"
    STOP_DECODE = "stop decode"
    CORRUPT = "corrupt"
    TWIN_PREFILL = "second process of a prefill worker's id"
    TWIN_DECODE = "second process of a decode worker's id"
    KILL_ROUTER = "kill router"
    RESET_WORKER = "reset all sessions of a worker"
    RESET_ROUTER = "reset all sessions of a router"
    CUT_SESSION = "cut session"
    HANG_PREFILL = "hang prefill engine"
    HANG_DECODE = "hang decode engine"
    FAIL_STEP_PREFILL = "fail a prefill step"
    FAIL_STEP_DECODE = "fail a decode step"
    FAIL_ROW_PREFILL = "fail a prefill row"
    FAIL_ROW_DECODE = "fail a decode row"
    NO_PREFILL = "all prefill workers gone for a while"
    NO_DECODE = "all decode workers gone for a while"
    STRANGER = "incompatible worker joins"
    DRAIN_PREFILL = "drain prefill"
    DRAIN_DECODE = "drain decode"
    DRAIN_ROUTER = "drain router"
    SWITCH_ROLE = "switch role"
    SLOW = "slow worker"
    JOIN = "worker joins"


ON_PREFILL = (
    Kind.KILL_PREFILL,
    Kind.KILL_UNHEARD,
    Kind.STOP_PREFILL,
    Kind.CORRUPT,
    Kind.TWIN_PREFILL,
    Kind.HANG_PREFILL,
    Kind.FAIL_STEP_PREFILL,
    Kind.FAIL_ROW_PREFILL,
    Kind.DRAIN_PREFILL,
)
ON_DECODE = (
    Kind.KILL_DECODE,
    Kind.STOP_DECODE,
    Kind.TWIN_DECODE,
    Kind.HANG_DECODE,
    Kind.FAIL_STEP_DECODE,
    Kind.FAIL_ROW_DECODE,
    Kind.DRAIN_DECODE,
)
ON_CLIENT = (Kind.CANCEL, Kind.DEAF_CLIENT)
ON_ROUTER = (Kind.KILL_ROUTER, Kind.RESET_ROUTER, Kind.DRAIN_ROUTER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault: from at_s on, as soon as the moment has come; lasts_s until it is mended.

    draw  which victim, and the like; in [0, 1)
    """

    kind: Kind
    at_s: float
    moment: Moment
    lasts_s: float
    draw: float
