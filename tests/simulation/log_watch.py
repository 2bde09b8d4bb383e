"""The log of a simulated cluster: lines for the tape, and what they tell about attempts and rows."""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import structlog

from decode_worker.attempt import DecodeState
from tests.simulation.client import Client
from tests.simulation.kinds import Moment
from tests.simulation.stage import Stage
from tests.simulation.tape import shown

COUNTED = ("WorkerLost", "LinkLost", "Stale", "KvCorrupt", "StepFailed")
"""Errors by which an attempt fails by somebody's fault."""
BUGS = ("owner.died", "request.crashed")
NAMED = ("attempt.", "lease.", "grant.", "sequence.", "piece.")
"""Events that belong to one attempt, whichever process tells of them."""


class LogWatch:
    """struck: requests that a failing step or row was part of, by name, and how often."""

    def __init__(self, stage: Stage, clients: Sequence[Client]) -> None:
        self.struck: dict[str, int] = {}
        self._stage = stage
        self._clients = {client.log.plan.name: client for client in clients}

    def configure(self) -> None:
        """Take in every line from now on, until structlog.reset_defaults()."""
        structlog.configure(
            processors=[self._take],
            wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
            cache_logger_on_first_use=False,
        )

    def _take(self, logger: Any, name: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
        kind = event["event"]
        text = " ".join(f"{key}={_short(value)}" for key, value in event.items() if key != "event")
        about = str(event.get("request_id", "")).partition(".")[0]
        ids = tuple(
            value for key in ("handle", "lease", "lease_id") if isinstance(value := event.get(key), int)
        )
        tape = self._stage.tape
        tape.tell(f"{tape.who}{kind} {text}", about=about, ids=ids)
        if kind in BUGS or event.get("error") == "InvariantViolated":
            self._stage.violate(f"log: {tape.who}{kind} {text}", about)
        if kind.startswith(NAMED) and not (about and event["attempt"]):
            self._stage.violate(f"log: {tape.who}{kind} doesn't say of whose attempt: {text}")
        match kind:
            case "attempt.failed":
                self._on_attempt_failed(event, about)
            case "attempt.refused":
                self._on_refused(event)
            case "step.died":
                self._on_step_died([each["handle"] for each in event["attempts"]])
            case "sequence.died":
                self._strike(event["handle"])
                self._count(17, event["handle"])
            case "grant.revoked" | "sequence.preempted":
                self._count(18, event["handle"])
            case _:
                pass
        raise structlog.DropEvent

    def _on_attempt_failed(self, event: Mapping[str, Any], about: str) -> None:
        """Each fault of an attempt must have a reason in what was done to its workers."""
        if event["error"] not in COUNTED:
            return
        if event["error"] == "StepFailed":
            self.struck[about] = self.struck.get(about, 0) + 1
        client = self._clients.get(about)
        router = client.log.routers[-1] if client is not None and client.log.routers else ""
        found = self._stage.ledger.explanation(
            self._stage.tape.now_s(), prefill=event["prefill"], decode=event["decode"], router=router
        )
        if found is None:
            self._stage.violate(
                f"{about}: an attempt on {event['prefill']} and {event['decode']} failed and nothing was wrong "
                f"with them: {event['reason']}",
                about,
            )

    def _on_refused(self, event: Mapping[str, Any]) -> None:
        """A refusal by a prefill worker comes after the grant."""
        legs = self._stage.sight.legs().get(event["handle"])
        by_prefill = legs is not None and legs.decode is not None and legs.decode.state is DecodeState.GRANTED
        if by_prefill:
            self._stage.coverage.add(3, Moment.GRANTED)
        elif event["error"] == "Overloaded":
            self._stage.coverage.add(19, Moment.QUEUED)

    def _on_step_died(self, handles: Sequence[int]) -> None:
        worker_id = self._stage.tape.who.rstrip(": ")
        self._stage.ledger.end(self._stage.ledger.begin("a step fails", workers=(worker_id,)))
        for handle in handles:
            self._strike(handle)
            self._count(16, handle)

    def _count(self, row: int, handle: int) -> None:
        legs = self._stage.sight.legs().get(handle)
        self._stage.coverage.add(row, *(() if legs is None else legs.phases))

    def _strike(self, handle: int) -> None:
        for router in self._stage.cluster.routers.values():
            for conductor in () if router.app is None else router.app.conductors:
                if any(run.attempt is not None and run.attempt.handle == handle for run in conductor.runs):
                    name = conductor.request_id.partition(".")[0]
                    self.struck[name] = self.struck.get(name, 0) + 1


def _short(value: object) -> str:
    if isinstance(value, BaseException):
        return f"{type(value).__name__}({value})"
    return shown(value)
