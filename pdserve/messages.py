"""Messages of a session between router and worker, as our code sees them; `pdserve.rpc` writes and reads them.

A handle (64 bit, drawn by the router, never reused) names one (request, choice, attempt). Positions are indices into
the sequence's ids, prompt included. Durations are seconds of the sender's clock; no timestamp crosses the wire.

`check` methods and functions in `Annotated` are asked about messages from other processes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated

from pdserve.block_messages import BlockCounts, BlockEvents
from pdserve.errors import Failure, InvalidRequest
from pdserve.ids import NAMELESS, AttemptName, WorkerRef
from pdserve.sampling import FinishReason, SampleKey, TokenLogprobs
from pdserve.wire_version import WireVersion


def _not_zero(name: str, value: int) -> None:
    if value == 0:
        raise InvalidRequest("a handle or lease id must not be 0", field=name)


def _finite_seconds(name: str, value: float) -> None:
    if not math.isfinite(value) or value < 0:
        raise InvalidRequest("want finite seconds, 0 or more", field=name, value=value)


Handle = Annotated[int, _not_zero]
Seconds = Annotated[float, _finite_seconds]


class Role(Enum):
    """What a worker does now."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class Phase(Enum):
    """Where an attempt is on a worker, for Progress."""

    QUEUED = "queued"
    PREFILLING = "prefilling"
    PULLING = "pulling"
    RUNNING = "running"
    PREEMPTED = "preempted"


# --- router to worker


@dataclass(frozen=True, slots=True)
class Welcome:
    """The router's first message; `wants_tokenizer` asks for the model's tokenizer files; wire as in Hello."""

    router_id: str
    wants_tokenizer: bool = False
    wire: WireVersion | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPrefill:
    """Compute the KV of token_ids, sample the token behind them, hand both to `decode_worker` under `lease_id`.

    token_ids may hold replayed tokens behind the prompt; num_skip_blocks leading blocks are at D already.
    """

    handle: Handle
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    key: SampleKey
    deadline_left_s: Seconds
    num_strikes: int
    lease_id: Handle
    decode_worker: WorkerRef
    num_skip_blocks: int
    cache_salt: str = ""
    name: AttemptName = NAMELESS

    def check(self) -> None:
        """Raises InvalidRequest."""
        _check_tokens(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartDecode:
    """Grant blocks for token_ids, whose KV `source` will offer; or, without a source, prefill them here."""

    handle: Handle
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    key: SampleKey
    deadline_left_s: Seconds
    num_strikes: int
    source: WorkerRef | None
    priority: int = 0
    age_s: Seconds = 0.0
    cache_salt: str = ""
    name: AttemptName = NAMELESS

    def check(self) -> None:
        """Raises InvalidRequest."""
        _check_tokens(self)


def _check_tokens(start: StartPrefill | StartDecode) -> None:
    if not 1 <= start.num_prompt_tokens <= len(start.token_ids):
        raise InvalidRequest(
            "want 1 <= num_prompt_tokens <= number of token ids",
            field="num_prompt_tokens",
            value=start.num_prompt_tokens,
            num_token_ids=len(start.token_ids),
        )


@dataclass(frozen=True, slots=True)
class Abort:
    """End the attempt of this handle, whatever its state; unknown handles are no error."""

    handle: Handle


@dataclass(frozen=True, slots=True)
class Pair:
    """Open, or join, the link to this decode worker."""

    decode_worker: WorkerRef
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Unpair:
    """This router no longer wants the link."""

    decode_worker: WorkerRef


@dataclass(frozen=True, slots=True)
class Demand:
    """Prompt tokens that wait in the router for this prefill worker's credit."""

    num_queued_tokens: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Take no new work, finish the rest."""


@dataclass(frozen=True, slots=True)
class SetRole:
    """Drain, then rejoin in this role."""

    role: Role


@dataclass(frozen=True, slots=True)
class Superseded:
    """A later epoch of this worker id has joined: exit and never redial."""


@dataclass(frozen=True, slots=True)
class DownHeartbeat:
    """The router lives."""


Down = (
    Welcome
    | StartPrefill
    | StartDecode
    | Abort
    | Pair
    | Unpair
    | Demand
    | Drain
    | SetRole
    | Superseded
    | DownHeartbeat
)


# --- worker to router


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Who joins: identity, role, addresses, and all that must fit between two workers of a pair.

    wire  the version that the sender speaks; None = 1.0, which didn't say it. timeouts: seconds by name
    nccl_library  version and file of what this process has loaded; "" = none
    """

    worker: WorkerRef
    role: Role
    role_generation: int
    model: str
    kv_addresses: tuple[str, ...]
    transports: tuple[str, ...]
    metrics_address: str
    kv_layout_json: str
    block_size: int
    num_blocks: int
    window_tokens: int
    weights_fingerprint: str
    tokenizer_fingerprint: str
    numerics: str
    deterministic: bool
    cache_seed: bytes
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    host_id: str
    draining: bool = False
    wire: WireVersion | None = None
    tp_rank: int = 0
    tp_size: int = 1
    timeouts: Mapping[str, float] = field(default_factory=dict)
    nccl_library: str = ""

    def check(self) -> None:
        """Raises InvalidRequest."""
        if not 0 <= self.tp_rank < self.tp_size:
            raise InvalidRequest(
                "want tp_rank < tp_size", field="tp_rank", value=self.tp_rank, tp_size=self.tp_size
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The worker's load now; only the newest matters.

    step_s  mean time of a step; slowest_step_s: of the recent ones, by which a hang is told from a long step
    num_queued_short_tokens  of num_queued_tokens: of prompts that are done in one chunk, which don't wait for others
    chunk_tokens             the largest chunk
    """

    blocks: BlockCounts
    num_running: int
    num_waiting: int
    num_queued_tokens: int
    num_queued_short_tokens: int
    chunk_tokens: int
    num_cache_hit_tokens: int
    num_cache_query_tokens: int
    prefill_tokens_per_s: float
    step_s: float
    slowest_step_s: float
    draining: bool


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The worker's loop lives, and its engine if num_steps moves; in_step_s: of its present step, if that is long."""

    num_steps: int
    has_work: bool
    in_step_s: Seconds = 0.0


@dataclass(frozen=True, slots=True)
class PairState:
    """State of the link to a decode worker: up over `transport`, or down for `reason`."""

    decode_worker: WorkerRef
    up: bool
    transport: str = ""
    reason: str = ""
    generation: int = 0


@dataclass(frozen=True, slots=True)
class Credits:
    """This session's balance in prompt tokens, absolute."""

    balance: int


@dataclass(frozen=True, slots=True)
class Granted:
    """The decode worker has set all blocks aside; `num_cached_blocks` leading ones it has already.

    lease_id  0 = none: it prefills for itself
    """

    handle: Handle
    lease_id: int
    num_cached_blocks: int


@dataclass(frozen=True, slots=True)
class Waiting:
    """The decode worker keeps the request in its list, at this place (0 = next)."""

    handle: Handle
    place: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The worker never started this attempt."""

    handle: Handle
    failure: Failure


@dataclass(frozen=True, slots=True)
class Progress:
    """Phase and amount (tokens prefilled, blocks pulled, tokens decoded) of an attempt."""

    handle: Handle
    phase: Phase
    amount: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """The prefill worker sampled the first token; with `reason` it ends the request and nothing is handed off."""

    handle: Handle
    token_id: int
    logprobs: TokenLogprobs | None
    reason: FinishReason | None
    num_cached_tokens: int
    queue_s: float
    prefill_s: float
    energy_j: float | None = None

    @property
    def final(self) -> bool:
        """Whether the request ends with this token."""
        return self.reason is not None


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log probabilities of prompt tokens from `first_position` on."""

    handle: Handle
    first_position: int
    tokens: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeStarted:
    """The decode worker's verdict: the hand-off happened (or its own prefill is done) and the sequence runs."""

    handle: Handle
    first_token: int
    logprobs: TokenLogprobs | None
    num_cached_tokens: int
    received_bytes: int = 0
    transport: str = ""
    transfer_s: float = 0.0
    transfer_exposed_s: float = 0.0
    commit_s: float = 0.0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    energy_j: float | None = None


@dataclass(frozen=True, slots=True)
class StepTokens:
    """New tokens of one sequence; token_ids[0] stands at index first_position of its ids.

    energy_j  of decoding it, from the start of the attempt to here; None: the machine can't tell
    """

    handle: Handle
    first_position: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    energy_j: float | None = None

    def check(self) -> None:
        """Raises InvalidRequest."""
        if not self.token_ids or (self.logprobs and len(self.logprobs) != len(self.token_ids)):
            raise InvalidRequest(
                "want at least one token and logprobs for none or each",
                field="token_ids",
                num_tokens=len(self.token_ids),
                num_logprobs=len(self.logprobs),
            )


@dataclass(frozen=True, slots=True)
class Step:
    """All tokens of one engine step for one router."""

    sequences: tuple[StepTokens, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceFinished:
    """The decode worker ended the sequence normally; num_tokens is the final length of its ids."""

    handle: Handle
    reason: FinishReason
    num_tokens: int
    decode_queue_s: float = 0.0
    decode_step_s: float = 0.0
    energy_j: float | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The attempt ended here by an error of the taxonomy."""

    handle: Handle
    failure: Failure


@dataclass(frozen=True, slots=True)
class Unsound:
    """The worker's last word: it ends itself, since its state can't be trusted. What it computes gets a strike."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class TokenizerFile:
    """One file of the model's folder that the router needs; `last` closes the set."""

    name: str
    content: bytes
    last: bool


AttemptMessage = (
    Granted
    | Waiting
    | Refused
    | Progress
    | FirstToken
    | PromptLogprobs
    | DecodeStarted
    | SequenceFinished
    | Failed
)
"""What comes under an attempt's handle, beside the tokens in Step."""

WorkerMessage = Hello | Load | Heartbeat | PairState | Credits | TokenizerFile | Unsound
"""What a worker says of itself."""

Up = AttemptMessage | Step | BlockEvents | WorkerMessage
