"""What must hold when all is over, whatever happened."""

from __future__ import annotations

from tests.simulation.client import ClientLog
from tests.simulation.cluster import SimCluster
from tests.simulation.scenario import Scenario

DEADLINE_SLACK_S = 0.5  # a delayed message may hold the last event up for so long


def end_violations(log: ClientLog, scenario: Scenario) -> list[str]:
    """Of one request: ended once, in a way that something explains, in its time."""
    plan = log.plan
    found = list(log.violations)
    if len(log.ends) != 1:
        return [*found, f"{plan.name}: {len(log.ends)} ends: {log.ends}"]
    end = log.ends[0]
    if end != "ok" and end not in _allowed_ends(log, scenario):
        found.append(f"{plan.name}: ended {end}: {log.error}")
    if plan.deadline_s is not None:
        took_s = log.ended_s - log.begun_s
        if took_s > plan.deadline_s + DEADLINE_SLACK_S:
            found.append(f"{plan.name}: took {took_s:.3f} s with a deadline of {plan.deadline_s} s")
    if plan.poisoned and end == "ok" and not _poison_unseen(log):
        found.append(f"{plan.name}: a poisoned request succeeded")
    return found


def _poison_unseen(log: ClientLog) -> bool:
    """Nothing computes the prompt if a resumed stream had all of it; else poison must show."""
    return log.num_resumes > 0


def _allowed_ends(log: ClientLog, scenario: Scenario) -> dict[str, None]:
    """Error classes that this request may end with under this scenario."""
    plan = log.plan
    allowed: dict[str, None] = {}
    if plan.cancel_after_s is not None:
        allowed["RequestCancelled"] = None
    if plan.reads_slowly_s:
        allowed["RequestCancelled"] = None
        allowed["DeadlineExceeded"] = None
    if plan.deadline_s is not None:
        allowed["DeadlineExceeded"] = None
        allowed["Overloaded"] = None
    if plan.poisoned:
        allowed["RowFailed"] = None
        allowed["StepFailed"] = None
    if scenario.config.router.max_queued_requests < len(scenario.plans):
        allowed["Overloaded"] = None
    if len(scenario.faults) >= scenario.config.router.max_attempts or _has_step_poison(scenario):
        # As many faults as attempts: one request may have met them all.
        for name in ("WorkerLost", "Stale", "KvCorrupt", "StepFailed", "NoWorker", "RowFailed"):
            if log.num_resumes or _attempts_of(log) >= scenario.config.router.max_attempts or name == "NoWorker":
                allowed[name] = None
    if len(scenario.router_ids) == 1:
        allowed["Draining"] = None
    return allowed


def _has_step_poison(scenario: Scenario) -> bool:
    return any(plan.poisoned for plan in scenario.plans)


def _attempts_of(log: ClientLog) -> int:
    value = None if log.error is None else log.error.fields.get("attempts")
    return int(str(value)) if value is not None else 0


def rest_violations(cluster: SimCluster) -> list[str]:
    """Of the quiet cluster: no block in use, no lease open, nothing queued, everybody back."""
    found: list[str] = []
    for worker in cluster.workers.values():
        counts = worker.counts()
        run = None if worker.worker is None else worker.worker.current
        if counts is None or run is None:
            found.append(f"{worker.id} is not running, exit codes {worker.exit_codes}")
            continue
        if counts.granted or counts.owned or counts.quarantined or counts.promised:
            found.append(f"{worker.id}: blocks in use at rest: {counts}")
        if run.core.attempts:
            found.append(f"{worker.id}: {len(run.core.attempts)} attempts at rest")
        if run.transfer.metrics.open_leases:
            found.append(f"{worker.id}: {run.transfer.metrics.open_leases} leases open at rest")
    for router in cluster.routers.values():
        if router.app is None:
            found.append(f"{router.id} is not running")
            continue
        queue = router.app.status().queue
        if queue.num_waiting or queue.num_running:
            found.append(f"{router.id}: {queue.num_waiting} waiting, {queue.num_running} running at rest")
    return found
