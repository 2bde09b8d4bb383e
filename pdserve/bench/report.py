"""What a run came to: rates, percentiles, the parts of TTFT, and how many requests were served as well as asked."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pdserve.bench.drive import REFUSED, RequestRecord, Run
from pdserve.percentile import percentile
from pdserve.request import Timings

PERCENTS = (50, 90, 95, 99)
# Timings that add up to the router's TTFT, in the order in which they run.
PARTS = ("queue_ms", "reserve_ms", "dispatch_ms", "prefill_queue_ms", "prefill_ms", "relay_ms", "rest_ms")


@dataclass(frozen=True, slots=True)
class Objectives:
    """What a request has to keep to count as served well; None = nothing asked."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    gap_s: float | None = None

    def met_by(self, outcome: RequestRecord) -> bool:
        """Refused, failed and stopped requests miss them, whatever they are."""
        if not outcome.is_ok:
            return False
        measured = (
            (self.ttft_s, outcome.ttft_s),
            (self.tpot_s, outcome.tpot_s),
            (self.gap_s, max(outcome.gaps_s, default=None)),
        )
        return all(most is None or value is None or value <= most for most, value in measured)

    def __str__(self) -> str:
        named = (("TTFT", self.ttft_s), ("TPOT", self.tpot_s), ("every gap", self.gap_s))
        asked = [f"{name} ≤ {most * 1e3:g} ms" for name, most in named if most is not None]
        return ", ".join(asked) or "none: whatever ends well counts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Of n values, in their own unit."""

    n: int
    mean: float
    percentiles: dict[int, float]
    max: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Distribution:
        known = sorted(value for value in values if value is not None)
        return cls(
            n=len(known),
            mean=sum(known) / len(known) if known else 0.0,
            percentiles={percent: percentile(known, percent) for percent in PERCENTS},
            max=known[-1] if known else 0.0,
        )

    def to_json(self) -> dict[str, float]:
        found = {
            "n": self.n,
            "mean": self.mean,
            **{f"p{p}": v for p, v in self.percentiles.items()},
            "max": self.max,
        }
        return {name: round(value, 3) for name, value in found.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Times in milliseconds, of requests that ended well; rates per second of the whole run.

    goodput    requests a second that met the objectives; share_good: of all that were sent
    codes      requests that ended otherwise, by code
    """

    seconds: float
    num_sent: int
    num_ok: int
    num_refused: int
    codes: dict[str, int]
    num_attempts: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    goodput: float
    share_good: float
    objectives: Objectives
    was_stopped: bool
    measured: dict[str, Distribution]
    parts: dict[str, Distribution]

    def to_json(self) -> dict[str, Any]:
        found = dataclasses.asdict(self)
        for group in ("measured", "parts"):
            found[group] = {name: each.to_json() for name, each in getattr(self, group).items()}
        return found | {"rates": {name: round(value, 3) for name, value in self.rates.items()}}

    @property
    def rates(self) -> dict[str, float]:
        """Per second."""
        counted = {
            "requests": self.num_ok,
            "prompt_tokens": self.num_prompt_tokens,
            "output_tokens": self.num_output_tokens,
        }
        return {name: number / self.seconds if self.seconds else 0.0 for name, number in counted.items()}


def make_report(run: Run, objectives: Objectives) -> Report:
    """Of one run."""
    outcomes = run.outcomes
    well = [outcome for outcome in outcomes if outcome.is_ok]
    num_good = sum(map(objectives.met_by, outcomes))
    return Report(
        seconds=run.seconds,
        num_sent=len(outcomes),
        num_ok=len(well),
        num_refused=sum(outcome.code in REFUSED for outcome in outcomes),
        codes=dict(Counter(outcome.code for outcome in outcomes if not outcome.is_ok)),
        num_attempts=sum(outcome.num_attempts for outcome in well),
        num_prompt_tokens=sum(outcome.num_prompt for outcome in well),
        num_cached_tokens=sum(outcome.num_cached for outcome in well),
        num_output_tokens=sum(outcome.num_tokens for outcome in outcomes),
        goodput=num_good / run.seconds if run.seconds else 0.0,
        share_good=num_good / len(outcomes) if outcomes else 0.0,
        objectives=objectives,
        was_stopped=run.was_stopped,
        measured={
            "ttft": _ms(well, lambda each: each.ttft_s),
            "tpot": _ms(well, lambda each: each.tpot_s),
            "gap": Distribution.of(gap * 1e3 for each in well for gap in each.gaps_s),
            "worst gap of a request": _ms(well, lambda each: max(each.gaps_s, default=None)),
            "whole request": _ms(well, lambda each: each.ended_s - each.sent_s),
            "sent late": _ms(outcomes, lambda each: each.sent_s - each.planned_s),
        },
        parts={
            name.removesuffix("_ms"): _part(well, name)
            for name in (*PARTS, "first_gap_ms", "transfer_exposed_ms")
        },
    )


def _ms(outcomes: Sequence[RequestRecord], seconds: Callable[[RequestRecord], float | None]) -> Distribution:
    measured = (seconds(outcome) for outcome in outcomes)
    return Distribution.of(None if value is None else value * 1e3 for value in measured)


def _part(outcomes: Sequence[RequestRecord], name: str) -> Distribution:
    known: list[Timings] = [outcome.timings for outcome in outcomes if outcome.timings is not None]
    return Distribution.of(getattr(timings, name) for timings in known)


def lines_of(report: Report) -> list[str]:
    """For people."""
    rates = report.rates
    lines = [
        f"{report.num_sent} requests in {report.seconds:.1f} s{' (stopped)' if report.was_stopped else ''}:"
        f" {report.num_ok} served, {report.num_refused} refused,"
        f" {report.num_sent - report.num_ok - report.num_refused} failed"
        + (
            f" ({', '.join(f'{code} {n}' for code, n in sorted(report.codes.items()))})"
            if report.codes
            else ""
        ),
        f"{rates['requests']:.2f} requests/s, {rates['output_tokens']:.1f} output tokens/s,"
        f" {rates['prompt_tokens']:.1f} prompt tokens/s (of these cached:"
        f" {report.num_cached_tokens / max(1, report.num_prompt_tokens):.0%})",
        f"goodput {report.goodput:.2f} requests/s, {report.share_good:.1%} of what was sent ({report.objectives})",
        "",
        _row("ms", ["n", "mean", *(f"p{percent}" for percent in PERCENTS), "max"]),
        *(_figures(name, each) for name, each in report.measured.items()),
        "",
        "where the router saw the time to first token go",
        *(_figures(name, each) for name, each in report.parts.items() if f"{name}_ms" in PARTS),
        "and behind it",
        *(_figures(name, each) for name, each in report.parts.items() if f"{name}_ms" not in PARTS),
    ]
    late = report.measured["sent late"]
    if late.percentiles[99] > max(10.0, 0.1 * report.measured["ttft"].percentiles[50]):
        lines.append(
            "requests were sent late: this machine couldn't keep up with sending, and the figures say as much of it"
        )
    return lines


def _figures(name: str, each: Distribution) -> str:
    values = (each.mean, *each.percentiles.values(), each.max)
    return _row(name.replace("_", " "), [str(each.n), *(f"{value:.1f}" for value in values)])


def _row(name: str, cells: Sequence[str]) -> str:
    return f"{name:24}" + "".join(f"{cell:>10}" for cell in cells)
