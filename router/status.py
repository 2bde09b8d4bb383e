"""What GetStatus tells: read from the fleet, the queue and the explanations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from pdserve.block_messages import BlockCounts
from pdserve.figures import NOTHING_COUNTED, RouterFigures
from pdserve.messages import Load
from pdserve.status import (
    CandidateStatus,
    ClusterStatus,
    PairStatus,
    PlacementStatus,
    QueueStatus,
    ScalingStatus,
    WorkerStatus,
)
from pdserve.wire_version import FIRST, text
from router.admission import Admission
from router.explain import NUM_KEPT, Explained, Verdict
from router.fleet import Fleet
from router.member import Member

_NO_LOAD = Load(
    blocks=BlockCounts(0, 0, 0, 0, 0),
    num_running=0,
    num_waiting=0,
    num_queued_tokens=0,
    num_queued_short_tokens=0,
    chunk_tokens=0,
    num_cache_hit_tokens=0,
    num_cache_query_tokens=0,
    prefill_tokens_per_s=0.0,
    step_s=0.0,
    slowest_step_s=0.0,
    draining=False,
)


def read_status(
    router_id: str,
    fleet: Fleet,
    admission: Admission,
    limit: int,
    num_requests: int,
    placements: tuple[PlacementStatus, ...],
    figures: RouterFigures,
    timeouts: Mapping[str, float],
    scaling: ScalingStatus | None,
) -> ClusterStatus:
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
    return ClusterStatus(
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
        figures=figures,
        timeouts=timeouts,
        scaling=scaling,
    )


def for_tenant(status: ClusterStatus, admission: Admission, tenant: str, num_requests: int) -> ClusterStatus:
    """What a tenant may see of it: that the router is there, and its own requests. num_requests: its own."""
    waiting = [ticket for ticket in admission.waiting if ticket.user == tenant]
    queue = QueueStatus(
        num_waiting=len(waiting),
        num_waiting_tokens=sum(len(ticket.need.token_ids) for ticket in waiting),
        num_running=max(0, num_requests - len(waiting)),
        limit=status.queue.limit,
    )
    return replace(status, workers=(), pairs=(), queue=queue, figures=NOTHING_COUNTED, scaling=None)


def read_placements(
    explanations: Iterable[Explained], admission: Admission, now_s: float, user: str | None
) -> tuple[PlacementStatus, ...]:
    """The last placements, oldest first, then what waits, in the order in which it came; so many of each.

    user  whose; None = all
    """
    placed = [
        (each.name, each.name.attempt, each.placed_s, each.verdicts, each.timings)
        for each in explanations
        if user is None or each.user == user
    ]
    tickets = [ticket for ticket in admission.waiting if user is None or ticket.user == user]
    waiting = [(each.name, 0, each.submitted_s, each.why_waiting, None) for each in tickets[:NUM_KEPT]]
    return tuple(
        PlacementStatus(
            request_id=name.request_id,
            choice=name.choice,
            attempt=attempt,
            age_s=now_s - since_s,
            candidates=_candidates(verdicts),
            timings=timings,
        )
        for name, attempt, since_s, verdicts, timings in (*placed, *waiting)
    )


def _candidates(verdicts: tuple[Verdict, ...]) -> tuple[CandidateStatus, ...]:
    return tuple(
        CandidateStatus(
            prefill_worker=each.prefill,
            decode_worker=each.decode,
            chosen=each.chosen,
            reason="" if each.chosen else each.reason,
            cost=() if each.cost is None else tuple((name, part_s * 1e3) for name, part_s in each.cost.parts),
        )
        for each in verdicts
    )


def _worker(member: Member) -> WorkerStatus:
    load = member.accounting.load or _NO_LOAD
    state = "draining" if member.draining else "hung" if member.liveness.suspect else "up"
    return WorkerStatus(
        id=member.id,
        role=member.hello.role.value,
        epoch=str(member.ref.epoch),
        role_generation=member.hello.role_generation,
        state=state,
        blocks=load.blocks,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_queued_tokens=load.num_queued_tokens,
        num_cache_hit_tokens=load.num_cache_hit_tokens,
        num_cache_query_tokens=load.num_cache_query_tokens,
        metrics_address=member.hello.metrics_address,
        numerics=member.hello.numerics,
        num_steps=member.liveness.num_steps,
        wire=text(member.hello.wire or FIRST),
        timeouts=member.hello.timeouts,
        prefill_tokens_per_s=load.prefill_tokens_per_s,
        step_s=load.step_s,
        slowest_step_s=load.slowest_step_s,
        nccl_library=member.hello.nccl_library,
    )
