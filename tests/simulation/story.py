"""What happened to one request, or around one violation, in readable lines."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tests.simulation.run import Result, Violation
from tests.simulation.tape import Line

_ID = re.compile(r"\b[0-9a-f]{16}\b")
_ALWAYS = ("FAULT", "MENDED", "VIOLATION", "worker.joined", "worker.left", "link.up", "link.down")
_MAX_WIDTH = 400


def request_of(violation: Violation, result: Result) -> str:
    """The request that a violation is about, or ""."""
    if violation.about:
        return violation.about
    names = {plan.prompt_ids: plan.name for plan in result.scenario.plans}
    for text in _ID.findall(violation.what):
        handle = int(text, 16)
        handle = result.tape.leases.get(handle, handle)
        if handle in result.tape.prompts:
            return names.get(result.tape.prompts[handle], "")
    return ""


def story(result: Result, request: str) -> Iterator[str]:
    """The lines of a full tape that concern a request: messages under its handles, frames of its leases, log lines,
    and what happened to the cluster meanwhile. Without a request: everything but messages and frames."""
    handles = _handles(result, request)
    ids = dict.fromkeys(handles) | {
        lease: None for lease, handle in result.tape.leases.items() if handle in handles
    }
    yield from (f"  {line}" for line in _about(result, request))
    for line in result.tape.lines:
        if _concerns(line, request, ids):
            yield str(line)[:_MAX_WIDTH]


def _about(result: Result, request: str) -> Iterator[str]:
    scenario = result.scenario
    yield f"seed {scenario.seed}: routers {', '.join(scenario.router_ids)}; workers " + ", ".join(
        f"{worker.id} ({worker.role.value}, {worker.num_blocks} blocks)" for worker in scenario.workers
    )
    for plan in scenario.plans:
        if plan.name == request:
            yield f"{plan}"


def _handles(result: Result, request: str) -> dict[int, None]:
    prompts = {plan.prompt_ids for plan in result.scenario.plans if plan.name == request}
    return {handle: None for handle, prompt in result.tape.prompts.items() if prompt in prompts}


def _concerns(line: Line, request: str, ids: dict[int, None]) -> bool:
    if not request:
        return " sends " not in line.text and " has " not in line.text
    return (
        line.about == request
        or any(its in ids for its in line.ids)
        or any(word in line.text for word in _ALWAYS)
    )
