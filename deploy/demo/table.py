"""The table behind the demo's streams: where the time of each request went. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdserve.response import Finished, Timings

# The rest of the time to first token is what no part explains: it should be small, or tiny.
REST_LIMIT_SHARE = 0.05
REST_LIMIT_MS = 2.0


@dataclass(frozen=True, slots=True)
class TableLine:
    """One line of the table; `part` of the line above it that is not a part."""

    name: str
    cells: tuple[str, ...]
    part: bool = False


def table_lines(finished: Sequence[Finished]) -> list[TableLine]:
    """All lines, one cell for each finished request."""

    def line(name: str, cell: Callable[[Finished], str], part: bool = False) -> TableLine:
        return TableLine(name, tuple(cell(each) for each in finished), part)

    def part(name: str, value: Callable[[Timings], float]) -> TableLine:
        return line(name, lambda each: _ms(value(each.timings)), part=True)

    return [
        line("prompt tokens", lambda each: f"{each.usage.num_prompt_tokens:,}"),
        line("of these cached", lambda each: f"{each.usage.num_cached_tokens:,}", part=True),
        line("output tokens", lambda each: f"{each.usage.num_completion_tokens:,}"),
        line("time to first token", lambda each: _ms(each.timings.ttft_ms)),
        part("queue in the router", lambda each: each.queue_ms),
        part("reserve blocks on D", lambda each: each.reserve_ms),
        part("dispatch to P", lambda each: each.dispatch_ms),
        part("queue on P", lambda each: each.prefill_queue_ms),
        part("prefill", lambda each: each.prefill_ms),
        part("relay to the client", lambda each: each.relay_ms),
        line("rest: R–P both ways", rest_text, part=True),
        line("first gap", lambda each: _ms(each.timings.first_gap_ms)),
        part("exposed transfer", lambda each: each.transfer_exposed_ms),
        part("commit", lambda each: each.commit_ms),
        part("queue on D", lambda each: each.decode_queue_ms),
        part("decode step", lambda each: each.decode_step_ms),
        part("rest", first_gap_rest_ms),
        line("token gap, p50", lambda each: _ms(each.timings.itl_p50_ms)),
        line("p99", lambda each: _ms(each.timings.itl_p99_ms), part=True),
        line("KV sent", lambda each: size_text(each.kv_bytes)),
        line("over", lambda each: each.transport or "–", part=True),
        line("prefill worker", lambda each: each.prefill_worker or "–"),
        line("decode worker", lambda each: each.decode_worker or "–"),
        line("attempts", lambda each: str(each.num_attempts)),
    ]


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
