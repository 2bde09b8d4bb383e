"""What GetStatus and GetModel tell: read from the fleet and the queue, turned into protobuf at the door."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.messages import BlockCounts
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.rpc.values import counts_to
from pdserve.status import CandidateStatus, PlacementStatus
from router.admission import Admission
from router.explain import NUM_KEPT, Explanations, Verdict
from router.fleet import Fleet
from router.member import Member

_NO_BLOCKS = BlockCounts(0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The model that is served."""

    model: str
    window_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool
    weights_fingerprint: str
    tokenizer_fingerprint: str

    def to_proto(self) -> pb.GetModelResponse:
        return pb.GetModelResponse(
            model=self.model,
            window_tokens=self.window_tokens,
            vocab_size=self.vocab_size,
            eos_token_ids=self.eos_token_ids,
            has_chat_template=self.has_chat_template,
            weights_fingerprint=self.weights_fingerprint,
            tokenizer_fingerprint=self.tokenizer_fingerprint,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """One worker; blocks and figures are of its newest load report."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class PairStatus:
    """One ordered pair."""

    prefill_worker: str
    decode_worker: str
    up: bool
    transport: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStatus:
    """The router's queue."""

    num_waiting: int
    num_waiting_tokens: int
    num_running: int
    limit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterStatus:
    """Everything of one router."""

    router_id: str
    draining: bool
    workers: tuple[WorkerStatus, ...]
    pairs: tuple[PairStatus, ...]
    queue: QueueStatus
    placements: tuple[PlacementStatus, ...] = ()

    def to_proto(self) -> pb.GetStatusResponse:
        workers = [
            pb.WorkerStatus(
                id=each.id,
                role=each.role,
                epoch=each.epoch,
                role_generation=each.role_generation,
                state=each.state,
                blocks=counts_to(each.blocks),
                num_running=each.num_running,
                num_waiting=each.num_waiting,
                num_queued_tokens=each.num_queued_tokens,
                num_cache_hit_tokens=each.num_cache_hit_tokens,
                num_cache_query_tokens=each.num_cache_query_tokens,
                metrics_address=each.metrics_address,
                numerics=each.numerics,
                num_steps=each.num_steps,
            )
            for each in self.workers
        ]
        pairs = [
            pb.PairStatus(
                prefill_worker=each.prefill_worker,
                decode_worker=each.decode_worker,
                up=each.up,
                transport=each.transport,
                reason=each.reason,
            )
            for each in self.pairs
        ]
        queue = pb.QueueStatus(
            num_waiting=self.queue.num_waiting,
            num_waiting_tokens=self.queue.num_waiting_tokens,
            num_running=self.queue.num_running,
            limit=self.queue.limit,
        )
        return pb.GetStatusResponse(
            workers=workers,
            pairs=pairs,
            queue=queue,
            router_id=self.router_id,
            draining=self.draining,
            placements=[each.to_proto() for each in self.placements],
        )


def read_status(
    router_id: str,
    fleet: Fleet,
    admission: Admission,
    limit: int,
    num_requests: int,
    placements: tuple[PlacementStatus, ...] = (),
) -> RouterStatus:
    """As it is now. num_requests: accepted and not ended."""
    pairs = tuple(
        PairStatus(
            prefill_worker=member.id,
            decode_worker=record.decode.id,
            up=record.up,
            transport=record.transport,
            reason=record.reason,
        )
        for member in fleet.members
        for record in member.pairs.values()
    )
    return RouterStatus(
        router_id=router_id,
        draining=admission.draining,
        workers=tuple(_worker(member) for member in fleet.members),
        pairs=pairs,
        queue=QueueStatus(
            num_waiting=admission.num_waiting,
            num_waiting_tokens=admission.num_waiting_tokens,
            num_running=max(0, num_requests - admission.num_waiting),
            limit=limit,
        ),
        placements=placements,
    )


def read_placements(
    explanations: Explanations, admission: Admission, now_s: float
) -> tuple[PlacementStatus, ...]:
    """The last placements, oldest first, then what waits, in the order in which it came; so many of each."""
    placed = [
        PlacementStatus(
            request_id=each.request_id,
            choice=each.choice,
            attempt=each.attempt,
            age_s=now_s - each.placed_s,
            candidates=_candidates(each.verdicts),
        )
        for each in explanations
    ]
    waiting = [
        PlacementStatus(
            request_id=ticket.request_id,
            choice=ticket.choice,
            attempt=0,
            age_s=now_s - ticket.submitted_s,
            candidates=_candidates(ticket.why_waiting),
        )
        for ticket in admission.waiting[:NUM_KEPT]
    ]
    return (*placed, *waiting)


def _candidates(verdicts: tuple[Verdict, ...]) -> tuple[CandidateStatus, ...]:
    return tuple(
        CandidateStatus(
            prefill_worker=each.prefill,
            decode_worker=each.decode,
            chosen=each.chosen,
            reason="" if each.chosen else each.reason,
            cost_ms=()
            if each.cost is None
            else tuple((name, part_s * 1e3) for name, part_s in each.cost.parts),
        )
        for each in verdicts
    )


def _worker(member: Member) -> WorkerStatus:
    load = member.accounting.load
    state = "draining" if member.draining else "hung" if member.liveness.suspect else "up"
    return WorkerStatus(
        id=member.id,
        role=member.hello.role.value,
        epoch=str(member.ref.epoch),
        role_generation=member.hello.role_generation,
        state=state,
        blocks=load.blocks if load is not None else _NO_BLOCKS,
        num_running=load.num_running if load is not None else 0,
        num_waiting=load.num_waiting if load is not None else 0,
        num_queued_tokens=load.num_queued_tokens if load is not None else 0,
        num_cache_hit_tokens=load.num_cache_hit_tokens if load is not None else 0,
        num_cache_query_tokens=load.num_cache_query_tokens if load is not None else 0,
        metrics_address=member.hello.metrics_address,
        numerics=member.hello.numerics,
        num_steps=member.liveness.num_steps,
    )
