"""Which of two clusters serves the same load better, and how sure that is.

Both ran the same requests, in turns. What is compared is the share of requests that met the objectives. Two things make
it uncertain, and the interval is the wider one of two. Requests that are neighbours in time wait in the same queues, so
they aren't independent: a block bootstrap (Künsch 1989) draws stretches of neighbours instead of single requests. And a
start differs from the next one, as a machine does from one minute to another: Student's interval of the rounds'
differences.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import stdev

from pdserve.bench.drive import RequestRecord
from pdserve.bench.report import Objectives
from pdserve.percentile import percentile

NUM_DRAWS = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Comparison:
    """Shares of requests that met the objectives; difference second - first, with its interval of CONFIDENCE."""

    first: float
    second: float
    low: float
    high: float
    num_requests: int
    num_rounds: int

    @property
    def difference(self) -> float:
        return self.second - self.first

    def verdict(self, first: str, second: str) -> str:
        """In words."""
        interval = (
            f"{self.first:.1%} and {self.second:.1%} of the requests met the objectives: difference"
            f" {self.difference * 100:+.1f} points, {CONFIDENCE:.0%} interval {self.low * 100:+.1f} to"
            f" {self.high * 100:+.1f} ({self.num_requests} requests, {self.num_rounds} rounds)"
        )
        if self.num_rounds == 1:
            interval += "; of one round, so what differs from one start to the next is not in it"
        if self.low > 0:
            return f"{second} serves this load better than {first}. {interval}"
        if self.high < 0:
            return f"{first} serves this load better than {second}. {interval}"
        return f"No difference between {first} and {second} is shown. {interval}"


def compare(
    firsts: Sequence[Sequence[RequestRecord]],
    seconds: Sequence[Sequence[RequestRecord]],
    objectives: Objectives,
    seed: int,
) -> Comparison:
    """Of the rounds of both; request i of each round is the same request."""
    num_requests = min(len(outcomes) for outcomes in (*firsts, *seconds))
    shares = [
        [
            sum(objectives.met_by(outcomes[number]) for outcomes in rounds) / len(rounds)
            for number in range(num_requests)
        ]
        for rounds in (firsts, seconds)
    ]
    differences = [second - first for first, second in zip(*shares, strict=True)]
    low, high = _of_requests(differences, random.Random(seed))
    if len(firsts) > 1:
        rounds = [
            _share(second[:num_requests], objectives) - _share(first[:num_requests], objectives)
            for first, second in zip(firsts, seconds, strict=True)
        ]
        slack = _student(len(rounds) - 1) * stdev(rounds) / math.sqrt(len(rounds))
        low, high = min(low, _mean(rounds) - slack), max(high, _mean(rounds) + slack)
    return Comparison(_mean(shares[0]), _mean(shares[1]), low, high, num_requests, len(firsts))


def _share(records: Sequence[RequestRecord], objectives: Objectives) -> float:
    return sum(map(objectives.met_by, records)) / len(records)


def _student(freedom: int) -> float:
    """Student's t for CONFIDENCE, both sides; above ten degrees of freedom that of ten, which is a little more."""
    return (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)[min(freedom, 10) - 1]


def _of_requests(values: Sequence[float], drawn: random.Random) -> tuple[float, float]:
    """Of their mean, by drawing stretches of neighbours around the circle."""
    n = len(values)
    stretch = max(1, round(math.sqrt(n)))
    circle = [*values, *values]
    sums = [sum(circle[begin : begin + stretch]) for begin in range(n)]
    num_stretches = max(1, round(n / stretch))
    means = sorted(
        sum(drawn.choices(sums, k=num_stretches)) / (num_stretches * stretch) for _ in range(NUM_DRAWS)
    )
    outside = (1 - CONFIDENCE) / 2 * 100
    return percentile(means, outside), percentile(means, 100 - outside)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
