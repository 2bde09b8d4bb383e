"""`pdserve status`: what a router sees of its cluster."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pdserve.cli.cluster_tables import BLOCK_STATES, headline, pairs_table, scaling_lines, workers_table
from pdserve.cli.target import add_target, open_client

if TYPE_CHECKING:
    from pdserve.response import Timings
    from pdserve.status import ClusterStatus, PlacementStatus, WorkerStatus

DESCRIPTION = """\
Prints the workers (role, id, epoch, state, load, KV blocks by state, prefix cache hits), the router's queue, and the
pairs with their transport; where the cluster is scaled, what was decided last and why. At rest no block is granted,
owned or quarantined. With --explain also, for the last requests and for those that wait: each pair that was looked at,
what it would have cost, and why it fell or won.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Target and form."""
    add_target(parser)
    parser.add_argument("--explain", action="store_true", help="why requests went where they went, or wait")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Ask once and print."""
    with open_client(arguments) as client:
        status = client.status(explain=arguments.explain)
    if arguments.json:
        answer = to_json(status)
        if arguments.explain:
            answer["placements"] = [placement_to_json(each) for each in status.placements]
        print(json.dumps(answer, ensure_ascii=False))
    else:
        _print_tables(status)
        if arguments.explain:
            print("\n".join(explain_lines(status)))
    return 0


def to_json(status: ClusterStatus) -> dict[str, Any]:
    """The object that --json prints."""
    return {
        "router": status.router_id,
        "draining": status.draining,
        "workers": [_worker_to_json(worker) for worker in status.workers],
        "queue": {
            "waiting": status.queue.num_waiting,
            "waiting_tokens": status.queue.num_waiting_tokens,
            "running": status.queue.num_running,
            "limit": status.queue.limit,
        },
        "pairs": [
            {
                "prefill_worker": pair.prefill_worker,
                "decode_worker": pair.decode_worker,
                "up": pair.up,
                "transport": pair.transport,
                "reason": pair.reason,
            }
            for pair in status.pairs
        ],
        "scaling": None if status.scaling is None else asdict(status.scaling),
    }


def _worker_to_json(worker: WorkerStatus) -> dict[str, Any]:
    blocks = {state: getattr(worker.blocks, state) for state in BLOCK_STATES}
    return {
        "id": worker.id,
        "role": worker.role,
        "epoch": worker.epoch,
        "role_generation": worker.role_generation,
        "state": worker.state,
        "load": {
            "running": worker.num_running,
            "waiting": worker.num_waiting,
            "queued_tokens": worker.num_queued_tokens,
        },
        "blocks": blocks,
        "cache_hits": {
            "hit_tokens": worker.num_cache_hit_tokens,
            "query_tokens": worker.num_cache_query_tokens,
        },
        "metrics": worker.metrics_address,
        "numerics": worker.numerics,
        "nccl_library": worker.nccl_library,
        "steps": worker.num_steps,
    }


def placement_to_json(placement: PlacementStatus) -> dict[str, Any]:
    """One of the objects that --json --explain adds."""
    return {
        "request_id": placement.request_id,
        "choice": placement.choice,
        "attempt": placement.attempt,
        "age_s": round(placement.age_s, 3),
        "candidates": [
            {
                "prefill_worker": each.prefill_worker,
                "decode_worker": each.decode_worker,
                "chosen": each.chosen,
                "reason": each.reason,
                "cost_ms": {name: round(ms, 3) for name, ms in each.cost},
            }
            for each in placement.candidates
        ],
        "ttft_ms": None if placement.timings is None else _rounded(placement.timings),
    }


def _rounded(timings: Timings) -> dict[str, float]:
    told = {"total": timings.ttft_ms, **timings.ttft_parts_ms}
    return {name: round(ms, 3) for name, ms in told.items()}


def explain_lines(status: ClusterStatus) -> list[str]:
    """What --explain prints below the tables."""
    lines = ["placements (cost in ms, the least wins)"]
    for each in status.placements:
        what = f"attempt {each.attempt}" if each.attempt else "waits"
        lines.append(f"{each.request_id} choice {each.choice}, {what}, {each.age_s:.1f} s ago")
        for candidate in each.candidates:
            pair = f"{candidate.prefill_worker or 'alone'} > {candidate.decode_worker}"
            parts = " + ".join(f"{name} {ms:.1f}" for name, ms in candidate.cost if ms)
            total = f"{sum(ms for _, ms in candidate.cost):.1f} = {parts}" if parts else "–"
            lines.append(
                f"  {'*' if candidate.chosen else ' '} {pair}: {total}: {candidate.reason or 'chosen'}"
            )
        if each.timings is not None:
            parts = " + ".join(f"{name} {ms:.1f}" for name, ms in each.timings.ttft_parts_ms.items() if ms)
            lines.append(f"  first token after {each.timings.ttft_ms:.1f} ms = {parts}")
    return lines if status.placements else ["no placements yet"]


def _print_tables(status: ClusterStatus) -> None:
    from rich.console import Console

    # Without a terminal the width is unknown: don't fold a table into 80 columns for grep.
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    for line in (headline(status), *scaling_lines(status)):
        console.print(line, markup=False)
    console.print(workers_table(status) if status.workers else "no workers have joined")
    console.print(pairs_table(status) if status.pairs else "no pairs")
