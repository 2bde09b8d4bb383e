"""A cluster's workers and pairs as tables for a terminal; `rich` is imported only when one is made."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from pdserve.status import ClusterStatus, WorkerStatus

BLOCK_STATES = ("free", "granted", "owned", "cached", "quarantined")


def headline(status: ClusterStatus) -> str:
    """The router and its queue in one line."""
    draining = " (draining)" if status.draining else ""
    queue = status.queue
    return (
        f"router {status.router_id}{draining}: {queue.num_running} running, "
        f"{queue.num_waiting} of at most {queue.limit} waiting ({queue.num_waiting_tokens} tokens)"
    )


def scaling_lines(status: ClusterStatus) -> list[str]:
    """What whoever scales the cluster said last, and why the numbers changed last; empty where nobody does."""
    scaling = status.scaling
    if scaling is None:
        return []
    lines = [f"scaling, {scaling.age_s:.0f} s ago: {scaling.why}"]
    if scaling.last_change:
        lines.append(f"last change, {scaling.change_age_s:.0f} s ago: {scaling.last_change}")
    return lines


def workers_table(status: ClusterStatus) -> Table:
    """One row a worker: load, blocks by state, prefix cache hits."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title="workers", title_justify="left")
    for heading in ("role", "id", "state", "epoch"):
        table.add_column(heading)
    for heading in ("running", "waiting", "queued tok", *BLOCK_STATES, "cache hits"):
        table.add_column(heading, justify="right")
    for worker in status.workers:
        load = (worker.num_running, worker.num_waiting, worker.num_queued_tokens)
        blocks = [getattr(worker.blocks, state) for state in BLOCK_STATES]
        row = [worker.role, worker.id, worker.state, worker.epoch, *load, *blocks, _hits(worker)]
        table.add_row(*[Text(str(cell)) for cell in row])
    return table


def pairs_table(status: ClusterStatus) -> Table:
    """One row a pair: up over which transport, or down for which reason."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title="pairs", title_justify="left")
    for heading in ("prefill", "decode", "state", "transport"):
        table.add_column(heading)
    for pair in status.pairs:
        state = "up" if pair.up else f"down: {pair.reason}"
        table.add_row(
            *[Text(cell) for cell in (pair.prefill_worker, pair.decode_worker, state, pair.transport)]
        )
    return table


def _hits(worker: WorkerStatus) -> str:
    if not worker.num_cache_query_tokens:
        return "–"
    share = worker.num_cache_hit_tokens / worker.num_cache_query_tokens
    return f"{worker.num_cache_hit_tokens} tok ({share:.0%})"
