"""What must hold when all is over, whatever happened."""

from __future__ import annotations

from collections.abc import Iterator

from pdserve.messages import Role
from tests.simulation.client import ClientLog
from tests.simulation.cluster import SimCluster, SimRouter, SimWorker
from tests.simulation.log_watch import COUNTED
from tests.simulation.newcomers import CAME_FIRST
from tests.simulation.outages import Outages
from tests.simulation.stage import Stage

DEADLINE_SLACK_S = 0.3  # the last event's delay, and clocks of another pace
FAULT_ENDS = COUNTED


class Verdicts:
    """Whether requests ended as they should.

    struck  requests that an injected fault of a step or row hit, and how often
    """

    def __init__(self, stage: Stage, outages: Outages, struck: dict[str, int]) -> None:
        self._stage = stage
        self._outages = outages
        self._struck = struck

    def judge(self, log: ClientLog) -> None:
        """One request: ended once, in its time, in a way that something explains."""
        plan = log.plan
        if len(log.ends) != 1:
            self._violate(log, f"{len(log.ends)} ends: {log.ends}")
            return
        [end] = log.ends
        why_not = "" if end == "ok" else self._why_not(log, end)
        if why_not:
            self._violate(log, f"ended {end}: {log.error}; {why_not}")
        took_s = log.ended_s - log.begun_s
        reads_late = log.is_deaf or plan.reads_slowly_s > 0
        if plan.deadline_s is not None and not reads_late and took_s > plan.deadline_s + DEADLINE_SLACK_S:
            self._violate(log, f"took {took_s:.3f} s with a deadline of {plan.deadline_s} s")
        if end == "ok" and plan.is_bad:
            self._violate(log, "a request over the window was served")
        if end == "ok" and plan.poison and log.num_resumes == 0:
            self._violate(log, "a poisoned request succeeded")

    def _why_not(self, log: ClientLog, end: str) -> str:
        """Why a request may not end like this; "" if it may."""
        plan, config = log.plan, self._stage.scenario.config
        match end:
            case "RequestCancelled":
                if log.cancelled_s is not None or log.is_deaf or plan.reads_slowly_s:
                    return ""
                return "its client never left"
            case "DeadlineExceeded":
                if plan.deadline_s is None:
                    return "it has no deadline"
                early_s = plan.deadline_s - (log.ended_s - log.begun_s)
                return "" if early_s < DEADLINE_SLACK_S else f"{early_s:.3f} s too early"
            case "InvalidRequest":
                return "" if plan.is_bad and str(plan.max_tokens) else "nothing is wrong with it"
            case "Overloaded":
                crowded = config.router.max_queued_requests < len(self._stage.scenario.plans)
                return "" if crowded or plan.deadline_s is not None else "the queue has room"
            case "NoWorker":
                waited_s = config.timeouts.worker_wait_s
                outage = self._outages.lasted(log.routers[-1], waited_s, log.begun_s, log.ended_s)
                return "" if outage else f"its router could always serve within {waited_s} s"
            case "RowFailed":
                return "" if plan.poison or self._struck.get(plan.name) else "nothing struck it"
            case "UnknownModel":
                return (
                    ""
                    if self._stage.ledger.happened(CAME_FIRST, router=log.routers[-1])
                    else "it is this model"
                )
            case "Draining":
                return "" if not log.routers else "its router doesn't drain"
            case _ if end in FAULT_ENDS:
                return self._why_not_by_fault(log)
            case _:
                return "an error that no request may see"

    def _why_not_by_fault(self, log: ClientLog) -> str:
        """A request that used up its attempts: each was explained when it failed; was there no other way?"""
        attempts = 0 if log.error is None else int(str(log.error.fields.get("attempts", 0)))
        if attempts < self._stage.scenario.config.router.max_attempts:
            return f"after {attempts} attempts"
        pair = self._healthy_pair(log)
        return "" if pair is None else f"{pair[0]} and {pair[1]} were well all the time"

    def _healthy_pair(self, log: ClientLog) -> tuple[str, str] | None:
        """A pair that nothing touched while the request ran, and that its router must have known."""
        workers = self._stage.cluster.workers.values()
        decodes = [worker.id for worker in workers if worker.role is not Role.PREFILL]
        if self._stage.scenario.config.router.pairs_per_prefill < len(decodes):
            return None
        for prefill in [worker.id for worker in workers if worker.role is Role.PREFILL]:
            for decode in decodes:
                if self._stage.ledger.is_healthy(
                    log.begun_s, log.ended_s, prefill=prefill, decode=decode, router=log.routers[-1]
                ):
                    return prefill, decode
        return None

    def _violate(self, log: ClientLog, what: str) -> None:
        self._stage.violate(f"{log.plan.name}: {what}", log.plan.name)


def unrest(cluster: SimCluster) -> Iterator[str]:
    """What is still going on in a cluster, or is left over: of a quiet one nothing."""
    for worker in cluster.workers.values():
        yield from _unrest_of_worker(worker)
    for router in cluster.routers.values():
        yield from _unrest_of_router(router, cluster)


def _unrest_of_worker(worker: SimWorker) -> Iterator[str]:
    counts = worker.counts()
    run = None if worker.worker is None else worker.worker.current
    if counts is None or run is None:
        yield f"{worker.id} is not running, exit codes {worker.exit_codes}"
        return
    if counts.granted or counts.owned or counts.quarantined:
        yield f"{worker.id}: blocks in use at rest: {counts}"
    if run.core.attempts:
        yield f"{worker.id}: {len(run.core.attempts)} attempts at rest"
    if run.transfer.metrics.open_leases:
        yield f"{worker.id}: {run.transfer.metrics.open_leases} leases open at rest"
    if not run.transfer.metrics.leases_add_up:
        yield f"{worker.id}: leases don't add up: {run.transfer.metrics}"
    if run.engine.num_aborted_prefill_tokens > run.engine.num_prefilled_tokens:
        yield f"{worker.id}: more prompt tokens aborted than computed"
    if run.engine.sequences:
        yield f"{worker.id}: {len(run.engine.sequences)} sequences in the scheduler at rest"


def _unrest_of_router(router: SimRouter, cluster: SimCluster) -> Iterator[str]:
    app = router.app
    if app is None:
        yield f"{router.id} is not running"
        return
    if app.conductors or app.admission.num_waiting or app.admission.num_waiting_tokens:
        yield f"{router.id}: {len(app.conductors)} requests, {app.admission.num_waiting} waiting at rest"
    if app.admission.num_places or app.admission.num_replaying:
        yield f"{router.id}: {app.admission.num_places} places, {app.admission.num_replaying} replays at rest"
    members = {member.id: member for member in app.fleet.members}
    for worker in cluster.workers.values():
        member = members.pop(worker.id, None)
        if member is None or member.ref != worker.ref or not member.usable:
            yield f"{router.id}: {worker.id} is not joined, or not usable"
            continue
        if member.legs:
            yield f"{router.id}: {len(member.legs)} attempts on {member.id} at rest"
        load = member.accounting.load
        if load is None or load.num_running or load.num_waiting or load.num_queued_tokens:
            yield f"{router.id}: {member.id} reports load at rest: {load}"
        if member.accounting.num_assigned or member.credit.num_held:
            yield f"{router.id}: bookings on {member.id} at rest"
        if member.prefills and member.credit.available <= 0:
            yield f"{router.id}: no credit of {member.id} at rest: {member.credit.available}"
        for record in member.pairs.values():
            if not record.up:
                yield f"{router.id}: pair {member.id}>{record.decode.id} is down: {record.reason}"
        run = None if worker.worker is None else worker.worker.current
        if run is not None and not member.cache.holds_exactly(run.engine.pool.hashes()):
            yield f"{router.id}: the prefix index of {member.id} isn't what it holds"
    if members:
        yield f"{router.id}: members that don't live: {', '.join(members)}"
