"""What tracing costs: a request that isn't sampled, one that is, and a span on its way to the collector.

python -m benchmarks.tracing
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

from pdserve.clock import SystemClock
from pdserve.ids import system_random
from pdserve.service.otlp import encode
from pdserve.tracing import Attribute, SpanEvent, SpanKind, Tracer

REPEATS, ROUNDS = 20_000, 9
UNSAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
SAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
LIMIT_US = 2.0
CLOCK = SystemClock()


def cost_us(call: Callable[[], object], repeats: int = REPEATS) -> float:
    """Median over rounds, microseconds a call."""
    rounds = []
    for _ in range(ROUNDS):
        begin_s = CLOCK.now_s()
        for _ in range(repeats):
            call()
        rounds.append((CLOCK.now_s() - begin_s) * 1e6 / repeats)
    return statistics.median(rounds)


def main() -> None:
    random = system_random()
    off, on = Tracer.off(), Tracer(lambda spans: None, random, 0.0)
    place = Tracer(lambda spans: None, random, 1.0).begin("")
    assert place is not None
    events = [SpanEvent("chunk", 1.0 + chunk / 100, {"pdserve.computed_tokens": chunk}) for chunk in range(4)]
    about: dict[str, Attribute] = {
        "pdserve.choice": 0,
        "pdserve.attempt": 1,
        "pdserve.prefill.worker": "p0",
        "pdserve.kv.bytes": 1 << 20,
    }

    def six() -> list[object]:
        below = place.below()
        return [
            place.span(
                "attempt", 1.0, 2.0, place=below, kind=SpanKind.SERVER, attributes=about, events=events
            ),
            *(below.span("part", 1.0, 2.0, attributes=about) for _ in range(5)),
        ]

    spans = six()
    unsampled = {
        "tracing off": cost_us(lambda: off.begin("")),
        "its router samples it not": cost_us(lambda: on.begin("")),
        "its client samples it not": cost_us(lambda: on.begin(UNSAMPLED)),
        "on a worker, without a trace": cost_us(lambda: on.join("")),
    }
    for what, us in unsampled.items():
        print(f"not sampled, {what:30} {us:6.2f} µs a request (limit {LIMIT_US:g})")
    print(f"sampled, a place found              {cost_us(lambda: on.begin(SAMPLED)):9.2f} µs")
    print(f"six spans built at the end          {cost_us(six, 2_000):9.2f} µs")
    print(f"six spans encoded, export's thread  {cost_us(lambda: encode(spans, {}, 0), 500):9.2f} µs")  # type: ignore[arg-type]
    assert max(unsampled.values()) < LIMIT_US


if __name__ == "__main__":
    main()
