"""What a router says about its model and its cluster: the answers of GetModel and GetStatus, in and out of protobuf."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Self

from pdserve.messages import BlockCounts
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.rpc.values import counts_from, counts_to


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The model that a cluster serves; window_tokens is the smallest of its workers'."""

    model: str
    window_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool
    weights_fingerprint: str
    tokenizer_fingerprint: str

    @classmethod
    def from_proto(cls, msg: pb.GetModelResponse) -> Self:
        """Out of the router's answer."""
        return cls(**{**_plain(cls, msg), "eos_token_ids": tuple(msg.eos_token_ids)})

    def to_proto(self) -> pb.GetModelResponse:
        """The router's side."""
        return pb.GetModelResponse(**_plain(type(self), self))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """One worker as a router knows it; blocks and figures are of its newest load report.

    state  "up", "hung" (it lives, but its engine doesn't step) or "draining"
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

    @classmethod
    def from_proto(cls, msg: pb.WorkerStatus) -> Self:
        """Out of the router's answer."""
        return cls(**{**_plain(cls, msg), "blocks": counts_from(msg.blocks)})

    def to_proto(self) -> pb.WorkerStatus:
        """The router's side."""
        return pb.WorkerStatus(**{**_plain(type(self), self), "blocks": counts_to(self.blocks)})


@dataclass(frozen=True, slots=True, kw_only=True)
class PairStatus:
    """One pair: up over a transport, or down for a reason."""

    prefill_worker: str
    decode_worker: str
    up: bool
    transport: str = ""
    reason: str = ""

    @classmethod
    def from_proto(cls, msg: pb.PairStatus) -> Self:
        """Out of the router's answer."""
        return cls(**_plain(cls, msg))

    def to_proto(self) -> pb.PairStatus:
        """The router's side."""
        return pb.PairStatus(**_plain(type(self), self))


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStatus:
    """The router's queue, and what runs beside it."""

    num_waiting: int
    num_waiting_tokens: int
    num_running: int
    limit: int

    @classmethod
    def from_proto(cls, msg: pb.QueueStatus) -> Self:
        """Out of the router's answer."""
        return cls(**_plain(cls, msg))

    def to_proto(self) -> pb.QueueStatus:
        """The router's side."""
        return pb.QueueStatus(**_plain(type(self), self))


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateStatus:
    """One pair, or (prefill_worker "") one worker alone, of one placement.

    cost_ms  by part; empty = it could not be taken. reason: why it was not chosen
    """

    prefill_worker: str
    decode_worker: str
    chosen: bool
    reason: str
    cost_ms: tuple[tuple[str, float], ...]

    @classmethod
    def from_proto(cls, msg: pb.Candidate) -> Self:
        """Out of the router's answer."""
        return cls(
            prefill_worker=msg.prefill_worker,
            decode_worker=msg.decode_worker,
            chosen=msg.chosen,
            reason=msg.reason,
            cost_ms=tuple((part.name, part.ms) for part in msg.cost),
        )

    def to_proto(self) -> pb.Candidate:
        """The router's side."""
        return pb.Candidate(
            prefill_worker=self.prefill_worker,
            decode_worker=self.decode_worker,
            chosen=self.chosen,
            reason=self.reason,
            cost=[pb.CostPart(name=name, ms=ms) for name, ms in self.cost_ms],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementStatus:
    """Where one attempt went; attempt 0: it waits, and why. age_s: since it was placed, or since it began to wait."""

    request_id: str
    choice: int
    attempt: int
    age_s: float
    candidates: tuple[CandidateStatus, ...]

    @classmethod
    def from_proto(cls, msg: pb.Placement) -> Self:
        """Out of the router's answer."""
        return cls(
            request_id=msg.request_id,
            choice=msg.choice,
            attempt=msg.attempt,
            age_s=msg.age_s,
            candidates=tuple(CandidateStatus.from_proto(each) for each in msg.candidates),
        )

    def to_proto(self) -> pb.Placement:
        """The router's side."""
        return pb.Placement(
            request_id=self.request_id,
            choice=self.choice,
            attempt=self.attempt,
            age_s=self.age_s,
            candidates=[each.to_proto() for each in self.candidates],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    """What one router sees; placements only if they were asked for."""

    router_id: str
    draining: bool
    workers: tuple[WorkerStatus, ...]
    pairs: tuple[PairStatus, ...]
    queue: QueueStatus
    placements: tuple[PlacementStatus, ...] = ()

    @classmethod
    def from_proto(cls, msg: pb.GetStatusResponse) -> Self:
        """Out of the router's answer."""
        return cls(
            router_id=msg.router_id,
            draining=msg.draining,
            workers=tuple(WorkerStatus.from_proto(each) for each in msg.workers),
            pairs=tuple(PairStatus.from_proto(each) for each in msg.pairs),
            queue=QueueStatus.from_proto(msg.queue),
            placements=tuple(PlacementStatus.from_proto(each) for each in msg.placements),
        )

    def to_proto(self) -> pb.GetStatusResponse:
        """The router's side."""
        return pb.GetStatusResponse(
            router_id=self.router_id,
            draining=self.draining,
            workers=[each.to_proto() for each in self.workers],
            pairs=[each.to_proto() for each in self.pairs],
            queue=self.queue.to_proto(),
            placements=[each.to_proto() for each in self.placements],
        )


def _plain(kind: type, source: object) -> dict[str, Any]:
    """The fields of a dataclass by name, as `source` has them: its messages name them alike."""
    return {field.name: getattr(source, field.name) for field in dataclasses.fields(kind)}
