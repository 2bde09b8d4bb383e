"""What a router says about its model and its cluster: the answers of GetModel and GetStatus, in and out of protobuf."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pdserve.block_messages import BlockCounts
from pdserve.figures import NOTHING_COUNTED, NotNegative, RouterFigures
from pdserve.response import Timings
from pdserve.rpc.codec import compile_converter
from pdserve.rpc.v1 import admin_pb2
from pdserve.rpc.v1 import inference_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The model that a cluster serves; window_tokens is the smallest of its workers'.

    tool_parser, reasoning_parser  by its chat template: names as settings have them; "" = none, or an older router
    """

    model: str
    window_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool
    weights_fingerprint: str
    tokenizer_fingerprint: str
    tool_parser: str = ""
    reasoning_parser: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """One worker as a router knows it; blocks and figures are of its newest load report.

    state     "up", "hung" (it lives, but its engine doesn't step) or "draining"
    wire      the version of sessions that it speaks
    timeouts  its own, seconds by their names in the configuration; empty: an older worker, which doesn't tell them
    nccl_library  version and file of what it has loaded; "" = none, or an older worker or router, which doesn't tell
    prefill_tokens_per_s, step_s, slowest_step_s  as in Load; 0 = not known yet, or an older router, which doesn't tell
    """

    id: str
    role: str
    epoch: str
    role_generation: int
    state: str
    blocks: BlockCounts
    num_running: int
    num_waiting: int
    num_queued_tokens: int
    num_cache_hit_tokens: int
    num_cache_query_tokens: int
    metrics_address: str
    numerics: str
    num_steps: int
    wire: str = ""
    timeouts: Mapping[str, float] = field(default_factory=dict)
    prefill_tokens_per_s: NotNegative = 0.0
    step_s: NotNegative = 0.0
    slowest_step_s: NotNegative = 0.0
    nccl_library: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairStatus:
    """One pair: up over a transport, or down for a reason."""

    prefill_worker: str
    decode_worker: str
    up: bool
    transport: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStatus:
    """The router's queue, and what runs beside it."""

    num_waiting: int
    num_waiting_tokens: int
    num_running: int
    limit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateStatus:
    """One pair, or (prefill_worker "") one worker alone, of one placement.

    cost  milliseconds by part; empty = it could not be taken. reason: why it was not chosen
    """

    prefill_worker: str
    decode_worker: str
    chosen: bool
    reason: str
    cost: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementStatus:
    """Where one attempt went; attempt 0: it waits, and why. age_s: since it was placed, or since it began to wait.

    timings  of the first token, if this attempt gave it: the parts of TTFT alone
    """

    request_id: str
    choice: int
    attempt: int
    age_s: float
    candidates: tuple[CandidateStatus, ...]
    timings: Timings | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingNote:
    """What a look of whoever scales the cluster came to: workers to have, and why, in words.

    change  why these numbers differ from those before; "" = they don't
    """

    num_prefill: int
    num_decode: int
    why: str
    change: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingStatus:
    """The last note; last_change: why the numbers changed last, "" = they haven't. age_s, change_age_s: since then."""

    num_prefill: int
    num_decode: int
    why: str
    age_s: float
    last_change: str = ""
    change_age_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    """What one router sees; placements only if they were asked for, scaling only where somebody scales."""

    router_id: str
    draining: bool
    workers: tuple[WorkerStatus, ...]
    pairs: tuple[PairStatus, ...]
    queue: QueueStatus
    placements: tuple[PlacementStatus, ...] = ()
    figures: RouterFigures = NOTHING_COUNTED
    timeouts: Mapping[str, float] = field(default_factory=dict)
    scaling: ScalingStatus | None = None


MODEL_INFO = compile_converter(ModelInfo, pb.GetModelResponse)
CLUSTER_STATUS = compile_converter(ClusterStatus, pb.GetStatusResponse)
SCALING_NOTE = compile_converter(ScalingNote, admin_pb2.ScalingNote)
"""To protobuf and back."""
