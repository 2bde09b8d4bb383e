"""A run as a picture: each request's time to first token when it was sent, and how times are distributed. SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar
from xml.sax.saxutils import escape

from pdserve.bench.drive import RequestRecord, Run

T = TypeVar("T")

_WIDTH, _HEIGHT = 1000, 420
_TOP, _BOTTOM = 60, 360
_COLOURS = ("#0b6bcb", "#c2410c", "#15803d")
_MAX_POINTS = 2000  # of a curve or a cloud: more aren't seen, and make a file that no viewer opens


def plot(run: Run, title: str) -> str:
    """The whole file."""
    times = {
        "time to first token": [
            each.ttft_s for each in run.outcomes if each.is_ok and each.ttft_s is not None
        ],
        "gap between tokens": [gap for each in run.outcomes if each.is_ok for gap in each.gaps_s],
        "whole request": [each.ended_s - each.sent_s for each in run.outcomes if each.is_ok],
    }
    body = [
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        _text(_WIDTH / 2, 24, title, size=15, anchor="middle"),
        *_over_time(run.outcomes, run.seconds),
        *_distributions(times),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img"'
        f' font-family="system-ui, sans-serif" font-size="11"><title>{escape(title)}</title>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def _over_time(outcomes: Sequence[RequestRecord], seconds: float) -> Iterator[str]:
    shown = _thinned(outcomes)
    known = [each.ttft_s for each in shown if each.is_ok and each.ttft_s is not None]
    x = _linear(0, max(seconds, 1e-3), 60, 470)
    y = _linear(0, max(known, default=1.0) * 1e3 or 1.0, _BOTTOM, _TOP)
    yield from _frame(60, 470, "sent, s", "time to first token, ms; × = refused or failed")
    for value in _round_steps(max(seconds, 1e-3)):
        yield _text(x(value), _BOTTOM + 16, f"{value:g}", anchor="middle")
    for value in _round_steps(max(known, default=1.0) * 1e3 or 1.0):
        yield _text(54, y(value) + 4, f"{value:g}", anchor="end")
        yield _line(60, y(value), 470, y(value), "#e5e7eb")
    for each in shown:
        if each.is_ok and each.ttft_s is not None:
            yield (
                f'<circle cx="{x(each.sent_s):.1f}" cy="{y(each.ttft_s * 1e3):.1f}" r="2.5"'
                f' fill="{_COLOURS[0]}" fill-opacity="0.6"/>'
            )
        elif not each.is_ok:
            yield _text(x(each.sent_s), _TOP + 4, "×", colour=_COLOURS[1], size=13, anchor="middle")


def _distributions(times: dict[str, list[float]]) -> Iterator[str]:
    values = [value for each in times.values() for value in each if value > 0]
    low, high = min(values, default=1e-3), max(values, default=1.0)
    x = _linear(math.log10(low * 0.9), math.log10(high * 1.1), 560, 970)
    y = _linear(0, 1, _BOTTOM, _TOP)
    yield from _frame(560, 970, "ms, logarithmic", "share that took no longer")
    for share in (0, 0.25, 0.5, 0.75, 0.9, 1):
        yield _text(554, y(share) + 4, f"{share:.0%}", anchor="end")
        yield _line(560, y(share), 970, y(share), "#e5e7eb")
    for power in range(math.ceil(math.log10(low * 0.9)), math.floor(math.log10(high * 1.1)) + 1):
        yield _text(x(power), _BOTTOM + 16, f"{10**power * 1e3:g}", anchor="middle")
        yield _line(x(power), _TOP, x(power), _BOTTOM, "#e5e7eb")
    for colour, (number, (name, each)) in zip(_COLOURS, enumerate(times.items()), strict=True):
        yield _line(572, _TOP + 10 + 16 * number, 590, _TOP + 10 + 16 * number, colour, width=3)
        yield _text(596, _TOP + 14 + 16 * number, f"{name} (n = {len(each)})")
        ranked = sorted(value for value in each if value > 0)
        points = [(x(math.log10(v)), y((rank + 1) / len(ranked))) for rank, v in enumerate(ranked)]
        if points:
            path = " ".join(f"{px:.1f},{py:.1f}" for px, py in _thinned(points))
            yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'


def _frame(left: int, right: int, below: str, above: str) -> Iterator[str]:
    yield _text(left, _TOP - 10, above)
    yield _text((left + right) / 2, _BOTTOM + 34, below, anchor="middle")
    yield _line(left, _BOTTOM, right, _BOTTOM, "#374151")
    yield _line(left, _TOP, left, _BOTTOM, "#374151")


def _linear(low: float, high: float, begin: float, end: float) -> Callable[[float], float]:
    span = high - low or 1.0
    return lambda value: begin + (value - low) / span * (end - begin)


def _round_steps(most: float) -> list[float]:
    """A few round numbers from 0 to `most`."""
    rough = most / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [step * number for number in range(int(most / step + 1e-9) + 1)]


def _thinned(values: Sequence[T]) -> list[T]:
    """At most _MAX_POINTS and the last one."""
    every = math.ceil(len(values) / _MAX_POINTS) or 1
    return [*values[::every], *values[-1:]]


def _text(
    x: float, y: float, text: str, *, size: int = 11, anchor: str = "start", colour: str = "#111827"
) -> str:
    where = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {where} font-size="{size}" fill="{colour}">{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, *, width: float = 1) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" stroke-width="{width}"/>'
