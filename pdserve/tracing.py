"""Spans: who did what for a request from when to when, in every process that has a part in it.

None is kept open. Each process builds its spans once, when its part is over, from times that it holds anyway; a request
that isn't sampled costs one draw, or one comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Self

from pdserve.ids import AttemptName, Random, draw_id64, system_random

Attribute = str | int | float | bool | tuple[str, ...]
Part = tuple[str, float, float, Mapping[str, Attribute]]
"""Name, begin, end, attributes."""

_SAMPLED = 0x01
_LOW_BITS = 64  # of a trace id: what the share of sampled ones is decided by, as other tracers do


class SpanKind(Enum):
    """CLIENT: it waits for another process, whose SERVER span is below it."""

    INTERNAL = "internal"
    SERVER = "server"
    CLIENT = "client"


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """A moment within a span, by the clock of the process."""

    name: str
    at_s: float
    attributes: Mapping[str, Attribute] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSpan:
    """begin_s and end_s are moments of the process's clock.

    parent_id  0 = it is the first of its trace
    links      ids of spans of the same trace that led to this one
    error      "" = it ended well, or by somebody's wish
    """

    name: str
    trace_id: int
    span_id: int
    parent_id: int
    begin_s: float
    end_s: float
    kind: SpanKind = SpanKind.INTERNAL
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    events: Sequence[SpanEvent] = ()
    links: Sequence[int] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """A place in a sampled trace: the span that others are made below. span_id 0: there is none yet."""

    trace_id: int
    span_id: int
    random: Random

    @property
    def traceparent(self) -> str:
        """As W3C Trace Context writes it, for the process that goes on below."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{_SAMPLED:02x}"

    def below(self) -> Trace:
        """The place of a span below this one that others are to be made below."""
        return Trace(self.trace_id, draw_id64(self.random), self.random)

    def span(
        self,
        name: str,
        begin_s: float,
        end_s: float,
        *,
        place: Trace | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Mapping[str, Attribute] | None = None,
        events: Sequence[SpanEvent] = (),
        links: Sequence[int] = (),
        error: str = "",
    ) -> TraceSpan:
        """One below this place. place: its own, where others know of it; None = nobody does."""
        return TraceSpan(
            name=name,
            trace_id=self.trace_id,
            span_id=draw_id64(self.random) if place is None else place.span_id,
            parent_id=self.span_id,
            begin_s=begin_s,
            end_s=max(begin_s, end_s),
            kind=kind,
            attributes=attributes or {},
            events=events,
            links=links,
            error=error,
        )

    def spans(
        self,
        parts: Sequence[Part],
        common: Mapping[str, Attribute],
        events: Mapping[str, Sequence[SpanEvent]],
        error: str,
    ) -> list[TraceSpan]:
        """Of a worker's parts in an attempt, one behind the other; events of each by its name.

        error  that ended it, in the last part; "" = none
        """
        return [
            self.span(
                name,
                begin_s,
                end_s,
                attributes={**common, **about},
                events=events.get(name, ()),
                error=error if place == len(parts) - 1 else "",
            )
            for place, (name, begin_s, end_s, about) in enumerate(parts)
        ]


def named_below(name: AttemptName, place: Trace | None) -> AttemptName:
    """The same, for a worker whose spans go below this place; None = it isn't traced."""
    return name if place is None else replace(name, traceparent=place.traceparent)


class Tracer:
    """Which requests are sampled, and where their spans go. Any thread may call.

    put           takes spans that are complete; never waits
    sample_ratio  share of the requests without a trace of their own
    """

    def __init__(
        self,
        put: Callable[[Sequence[TraceSpan]], None],
        random: Random,
        sample_ratio: float,
        *,
        is_on: bool = True,
    ) -> None:
        self.put = put
        self._random = random
        self._bound = round(sample_ratio * (1 << _LOW_BITS))
        self._is_on = is_on

    @classmethod
    def off(cls) -> Self:
        """Samples nothing."""
        return cls(lambda spans: None, system_random(), 0.0, is_on=False)

    def begin(self, traceparent: str) -> Trace | None:
        """Of a request whose client sent this, or "" for none: the place above it; None = it isn't sampled.

        A client's own decision is followed; a request without one begins a trace, or doesn't.
        """
        if not self._is_on:
            return None
        if traceparent:
            return self.join(traceparent)
        trace_id = self._random.getrandbits(128)
        if trace_id & ((1 << _LOW_BITS) - 1) >= self._bound:
            return None
        return Trace(trace_id or 1, 0, self._random)

    def join(self, traceparent: str) -> Trace | None:
        """The place that another process named, if it samples this trace. traceparent: "", or of the right form."""
        if not traceparent or not self._is_on:
            return None
        _, trace_id, span_id, flags = traceparent.split("-")[:4]
        if not int(flags, 16) & _SAMPLED:
            return None
        return Trace(int(trace_id, 16), int(span_id, 16), self._random)
