"""The table behind the demo's streams: where the time of each request went."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rich.table import Table

from pdserve.response import Finished, Timings

# The rest of the time to first token is what no part explains: it should be small, or tiny.
REST_LIMIT_SHARE = 0.05
REST_LIMIT_MS = 2.0

Cell = Callable[[Finished], str]


def table_of(finished: Mapping[str, Finished]) -> Table:
    """A column for each stream, by its label."""
    table = Table("", box=None, pad_edge=False, header_style="bold")
    for label in finished:
        table.add_column(label, justify="right")
    for name, cell in ROWS.items():
        style = "dim" if name.startswith(" ") else None
        table.add_row(name, *(cell(each) for each in finished.values()), style=style)
    return table


def rest_text(finished: Finished) -> str:
    """The unexplained rest of the time to first token with its share; marked when it is neither small nor tiny."""
    timings = finished.timings
    share = timings.rest_ms / timings.ttft_ms if timings.ttft_ms else 0.0
    large = share >= REST_LIMIT_SHARE and timings.rest_ms >= REST_LIMIT_MS
    return f"{_ms(timings.rest_ms)} ({share:.1%}){' !' if large else ''}"


def first_gap_rest_ms(timings: Timings) -> float:
    """What of the first gap no part explains: messages on their way; negative where parts ran before token 0 came."""
    explained = (
        timings.transfer_exposed_ms + timings.commit_ms + timings.decode_queue_ms + timings.decode_step_ms
    )
    return timings.first_gap_ms - explained


def size_text(num_bytes: int) -> str:
    """A size as people read it."""
    if num_bytes >= 1 << 20:
        return f"{num_bytes / (1 << 20):.1f} MiB"
    return f"{num_bytes / (1 << 10):.0f} KiB"


def _ms(value: float) -> str:
    return f"{value:,.1f} ms"


def _time(value: Callable[[Timings], float]) -> Cell:
    return lambda each: _ms(value(each.timings))


ROWS: dict[str, Cell] = {
    "prompt tokens": lambda each: f"{each.usage.num_prompt_tokens:,}",
    "  of these cached": lambda each: f"{each.usage.num_cached_tokens:,}",
    "output tokens": lambda each: f"{each.usage.num_completion_tokens:,}",
    "time to first token": _time(lambda each: each.ttft_ms),
    "  queue in the router": _time(lambda each: each.queue_ms),
    "  reserve blocks on D": _time(lambda each: each.reserve_ms),
    "  dispatch to P": _time(lambda each: each.dispatch_ms),
    "  queue on P": _time(lambda each: each.prefill_queue_ms),
    "  prefill": _time(lambda each: each.prefill_ms),
    "  relay to the client": _time(lambda each: each.relay_ms),
    "  rest: R–P both ways": rest_text,
    "first gap": _time(lambda each: each.first_gap_ms),
    "  exposed transfer": _time(lambda each: each.transfer_exposed_ms),
    "  commit": _time(lambda each: each.commit_ms),
    "  queue on D": _time(lambda each: each.decode_queue_ms),
    "  decode step": _time(lambda each: each.decode_step_ms),
    "  rest": _time(first_gap_rest_ms),
    "token gap, p50": _time(lambda each: each.itl_p50_ms),
    "  p99": _time(lambda each: each.itl_p99_ms),
    "KV sent": lambda each: size_text(each.kv_bytes),
    "  over": lambda each: each.transport or "–",
    "prefill worker": lambda each: each.prefill_worker or "–",
    "decode worker": lambda each: each.decode_worker or "–",
    "attempts": lambda each: str(each.num_attempts),
}
"""By name, which is indented where it is a part of the row above that isn't one."""
