"""`pdserve doctor`: whether a running cluster is as it should be, pair by pair."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from pdserve.cli.target import add_operators, ask_operators
from pdserve.errors import InvalidRequest, PdserveError

if TYPE_CHECKING:
    from pdserve.operator_client import OperatorClient
    from pdserve.status import ClusterStatus, PairStatus

DESCRIPTION = """\
Checks a running cluster. Over every pair it moves real KV blocks twice: those of a short prompt for the latency, those
of a long one for the bandwidth. The prompts are random ids, computed on the prefill worker and handed over with the
same checksums as any request's. Then it compares the processes: states, wire versions, numerics, NCCL libraries and
their files, and the order of the time-outs across them. One line per check; exit code 1 if one fails.
"""
_OK, _NOTE, _BAD = "ok", "note", "FAIL"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Router, sizes."""
    add_operators(parser)
    parser.add_argument(
        "--tokens",
        type=int,
        default=512,
        metavar="N",
        help="of the long prompt (default 512; cut to the window)",
    )
    parser.add_argument(
        "--deadline-s", type=float, default=60.0, metavar="S", help="for each prompt (default 60)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a check")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line. verdict: ok, note (worth knowing, not wrong) or FAIL."""

    verdict: str
    subject: str
    said: str


def run(arguments: argparse.Namespace) -> int:
    """Look, and say."""
    if arguments.tokens < 1:
        raise InvalidRequest("--tokens must be at least 1", value=arguments.tokens)
    if not arguments.deadline_s > 0:
        raise InvalidRequest("--deadline-s must be above 0", value=arguments.deadline_s)
    findings: list[Finding] = []

    def tell(finding: Finding) -> None:
        findings.append(finding)
        text = f"{finding.verdict:<4} {finding.subject}: {finding.said}"
        print(json.dumps(asdict(finding), ensure_ascii=False) if arguments.json else text, flush=True)

    async def look(operator: OperatorClient) -> None:
        status = await operator.status()
        for finding in compare(status):
            tell(finding)
        for pair in status.pairs:
            tell(await _probe(operator, pair, arguments.tokens, arguments.deadline_s))

    ask_operators(arguments, look)
    return 1 if any(finding.verdict == _BAD for finding in findings) else 0


async def _probe(operator: OperatorClient, pair: PairStatus, num_tokens: int, deadline_s: float) -> Finding:
    subject = f"{pair.prefill_worker} > {pair.decode_worker}"
    if not pair.up:
        return Finding(_BAD, subject, f"down: {pair.reason or 'no reason given'}")
    try:
        short, long = [
            await operator.probe_pair(pair.prefill_worker, pair.decode_worker, size, deadline_s=deadline_s)
            for size in (1, num_tokens)
        ]
    except PdserveError as error:
        return Finding(_BAD, subject, " ".join(str(error).split()))
    if not short.num_kv_bytes or not long.num_kv_bytes:
        return Finding(_BAD, subject, "a hand-off brought no bytes")
    speed = f", {long.num_kv_bytes / long.transfer_s / 1e6:,.0f} MB/s" if long.transfer_s > 0 else ""
    return Finding(
        _OK,
        subject,
        f"{short.num_kv_bytes:,} bytes in {short.transfer_s * 1e3:.2f} ms, {long.num_kv_bytes:,} in "
        f"{long.transfer_s * 1e3:.2f} ms{speed} over {long.transport}; first token of {long.num_prompt_tokens} "
        f"tokens after {long.ttft_s * 1e3:.0f} ms",
    )


def compare(status: ClusterStatus) -> Iterable[Finding]:
    """What the router's status tells without a request."""
    yield from _roles(status)
    for worker in status.workers:
        good = worker.state == "up"
        yield Finding(_OK if good else _BAD, worker.id, f"{worker.role}, {worker.state}")
        if worker.blocks.quarantined:
            yield Finding(_NOTE, worker.id, f"{worker.blocks.quarantined} blocks are quarantined")
    yield _same("wire version", {worker.id: worker.wire or "not told" for worker in status.workers})
    yield _same("numerics", {worker.id: worker.numerics for worker in status.workers})
    yield from _nccl({worker.id: worker.nccl_library for worker in status.workers if worker.nccl_library})
    yield from _timeouts(status)


def _nccl(by_worker: Mapping[str, str]) -> Iterable[Finding]:
    """Communicators of one library are unknown to another in the same process."""
    for worker, library in by_worker.items():
        if library.startswith("several"):
            yield Finding(_BAD, worker, f"more than one NCCL library in a process; {library}")
    if by_worker:
        yield _same("NCCL", by_worker)


def _roles(status: ClusterStatus) -> Iterable[Finding]:
    if status.draining:
        yield Finding(_BAD, f"router {status.router_id}", "it drains")
    prefills = any(worker.role in ("prefill", "both") for worker in status.workers)
    decodes = any(worker.role in ("decode", "both") for worker in status.workers)
    for there, name in ((prefills, "prefills"), (decodes, "decodes")):
        if not there:
            yield Finding(_BAD, f"router {status.router_id}", f"no worker that {name} has joined")


def _same(subject: str, by_worker: Mapping[str, str]) -> Finding:
    """Differences are allowed, since a cluster is upgraded one by one, but somebody should know of them."""
    values = sorted(set(by_worker.values()))
    if len(values) <= 1:
        return Finding(_OK, subject, f"{values[0] or 'not told'} everywhere" if values else "no workers")
    parts = (f"{value or 'not told'} on {', '.join(_having(by_worker, value))}" for value in values)
    return Finding(_NOTE, subject, "; ".join(parts))


def _having(by_worker: Mapping[str, str], value: str) -> list[str]:
    return [worker for worker, told in by_worker.items() if told == value]


def _timeouts(status: ClusterStatus) -> Iterable[Finding]:
    """The order that one process checks in its own configuration must hold between processes, too."""
    from pdserve.service.config import out_of_order

    told = {worker.id: _of_links(worker.timeouts) for worker in status.workers if worker.timeouts}
    if not status.timeouts or not told:
        yield Finding(_NOTE, "time-outs", "an older version doesn't tell them")
        return
    problems = {
        worker: problem
        for worker, own in told.items()
        if (problem := out_of_order({**status.timeouts, **own}))
    }
    for worker, problem in problems.items():
        yield Finding(_BAD, "time-outs", f"{worker}'s links and the router's requests {problem}")
    yield _same("time-outs of links", {worker: _shown(own) for worker, own in told.items()})
    if not problems:
        yield Finding(_OK, "time-outs", "in order across router and workers")


def _of_links(timeouts: Mapping[str, float]) -> dict[str, float]:
    """Those that a worker's links go by; the others are the router's to judge requests by."""
    return {name: timeouts[name] for name in ("keepalive_s", "link_s", "lease_s") if name in timeouts}


def _shown(timeouts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in timeouts.items())
