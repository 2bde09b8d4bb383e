"""What the loop and the engine owner of a worker say to each other.

Session messages travel in `FromSession` and `ToSession`; a session id is the worker's own serial number of one
session with one router, never reused in a process.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.ids import WorkerRef
from pdserve.messages import Down, Up
from pdserve.token_matcher import TokenMatcher

# --- loop -> engine


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """A router took this worker in."""

    session_id: int
    router_id: str


@dataclass(frozen=True, slots=True)
class SessionClosed:
    """The session has ended: all that came through it is aborted."""

    session_id: int


@dataclass(frozen=True, slots=True)
class FromSession:
    """One message of a router.

    received_s  when the loop read it, by the worker's clock; None = now. The engine's step in between is waiting, too.
    matcher     of a start whose request has a structure; it has taken in what the request has generated already
    """

    session_id: int
    message: Down
    received_s: float | None = None
    matcher: TokenMatcher | None = None


@dataclass(frozen=True, slots=True)
class LinkChanged:
    """The link to a decode worker came up or went down (prefill worker). Sent before the routers are told."""

    decode_worker: WorkerRef
    up: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class BeginDrain:
    """Take no new work; what is left in `drain_s` ends as Draining. Answered by `Drained`."""

    drain_s: float


# --- engine -> loop


@dataclass(frozen=True, slots=True)
class ToSession:
    """A message for one router; dropped if its session has ended."""

    session_id: int
    message: Up


@dataclass(frozen=True, slots=True)
class ToAll:
    """A message for every router; the newest Load is also given to those that join later."""

    message: Up


@dataclass(frozen=True, slots=True)
class StepBegun:
    """The engine is about to compute a step. new_shape: no step of its shape ran before, so it may take long."""

    new_shape: bool


@dataclass(frozen=True, slots=True)
class EngineBeat:
    """A turn of the engine owner is over; said when something has changed, and at each heartbeat.

    num_steps  steps computed since start
    has_work   there is something that the next step can compute
    step_s     duration of the newest step
    """

    num_steps: int
    has_work: bool
    step_s: float


@dataclass(frozen=True, slots=True)
class CacheChanged:
    """Changes of the prefix cache in order: (True, hash) = became a hit, (False, hash) = is gone."""

    changes: tuple[tuple[bool, bytes], ...]


@dataclass(frozen=True, slots=True)
class CoreCounts:
    """Totals since the engine owner's start, for metrics.

    num_prefilled_tokens  prompt tokens computed here, hits not among them; of these, num_aborted_prefill_tokens belong
                          to prompts that ended before they had a first token
    ignored               messages that came too late, or once more, by kind
    attempt_states, sequence_states  how many are in each state of their state machines now
    quarantine_age_s      of the block that has been QUARANTINED longest; 0 = there is none
    failures              errors told to routers, by class name
    num_masks, mask_s     masks of structures, and the seconds that making them took
    prefill_energy_j, decode_energy_j  None: the machine can't tell, or nothing was computed yet
    """

    num_prefilled_tokens: int = 0
    num_aborted_prefill_tokens: int = 0
    num_generated_tokens: int = 0
    num_cache_query_tokens: int = 0
    num_cache_hit_tokens: int = 0
    num_preemptions: int = 0
    num_revocations: int = 0
    ignored: tuple[tuple[str, int], ...] = ()
    attempt_states: tuple[tuple[str, int], ...] = ()
    sequence_states: tuple[tuple[str, int], ...] = ()
    quarantine_age_s: float = 0.0
    failures: tuple[tuple[str, int], ...] = ()
    num_masks: int = 0
    mask_s: float = 0.0
    prefill_energy_j: float | None = None
    decode_energy_j: float | None = None


@dataclass(frozen=True, slots=True)
class Drained:
    """Nothing is left in hand and nothing new is taken."""
