"""The requests of a run, made before it begins: the same options and seed give the same prompts at the same moments."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from pdserve.bench.trace import BLOCK_TOKENS, TraceRow
from pdserve.errors import InvalidRequest
from pdserve.request import GenerateRequest
from pdserve.sampling import SamplingParams
from pdserve.status import ModelInfo


@dataclass(frozen=True, slots=True)
class Planned:
    """at_s: when to send it, since the run's begin; not used where a fixed number of requests is kept going."""

    at_s: float
    request: GenerateRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What to send.

    rows           of a trace; None = prompts of prompt_tokens and outputs of output_tokens each
    num_requests   None = all of the trace (without one: 100)
    rate           requests a second, Poisson; None = when the trace says, or as concurrency allows
    rate_scale     the trace's own times run so many times faster
    length_scale   all lengths of the trace times this; prefix blocks shrink with them
    shared_prefix  so many tokens are the same at the begin of all prompts; of no trace
    """

    rows: tuple[TraceRow, ...] | None = None
    num_requests: int | None = None
    rate: float | None = None
    rate_scale: float = 1.0
    length_scale: float = 1.0
    prompt_tokens: int = 512
    output_tokens: int = 64
    shared_prefix: int = 0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """num_left_out: requests of the trace that don't fit the model's window."""

    requests: tuple[Planned, ...]
    num_left_out: int


def make_plan(options: PlanOptions, model: ModelInfo) -> LoadPlan:
    """Prompts of random ids, which no end-of-sequence token is among; outputs of exactly the planned length, greedy.

    Raises InvalidRequest if nothing is left to send.
    """
    rows = _scaled(options) if options.rows is not None else _even(options)
    fit = [row for row in rows if row.num_prompt + row.num_output <= model.window_tokens]
    wanted = options.num_requests or (100 if options.rows is None else len(fit))
    if not fit:
        raise InvalidRequest(
            "none of the requests fits the model's window: scale their lengths", limit=model.window_tokens
        )
    times = _times(options)
    prompts = _Prompts(options, model)
    requests = tuple(
        Planned(
            row.at_s if times is None else next(times),
            _request(prompts.of(number, row), row.num_output, options),
        )
        for number, row in enumerate(islice(fit, wanted))
    )
    return LoadPlan(requests, len(rows) - len(fit))


def _even(options: PlanOptions) -> list[TraceRow]:
    return [TraceRow(0.0, options.prompt_tokens, options.output_tokens)] * (options.num_requests or 100)


def _scaled(options: PlanOptions) -> list[TraceRow]:
    assert options.rows is not None
    return [
        TraceRow(
            row.at_s / options.rate_scale,
            max(1, round(row.num_prompt * options.length_scale)),
            max(1, round(row.num_output * options.length_scale)),
            row.blocks,
        )
        for row in options.rows
    ]


def _times(options: PlanOptions) -> Iterator[float] | None:
    """Poisson arrivals; None: the rows' own times."""
    if options.rate is None:
        return None
    return _poisson(options.rate, random.Random(f"arrivals {options.seed}"))


def _poisson(rate: float, drawn: random.Random) -> Iterator[float]:
    at_s = 0.0
    while True:
        yield at_s
        at_s += drawn.expovariate(rate)


class _Prompts:
    """Token ids by request, and by prefix block."""

    def __init__(self, options: PlanOptions, model: ModelInfo) -> None:
        ends = set(model.eos_token_ids)
        self._ids = [token_id for token_id in range(model.vocab_size) if token_id not in ends]
        self._seed = options.seed
        self._block_tokens = max(1, round(BLOCK_TOKENS * options.length_scale))
        self._shared = self._draw("shared", options.shared_prefix)
        self._blocks: dict[int, tuple[int, ...]] = {}

    def of(self, number: int, row: TraceRow) -> tuple[int, ...]:
        """The prompt of a request: its blocks' tokens where it has any, then its own."""
        begin = self._shared
        for block in row.blocks[: math.ceil(row.num_prompt / self._block_tokens)]:
            if block not in self._blocks:
                self._blocks[block] = self._draw(f"block {block}", self._block_tokens)
            begin += self._blocks[block]
        own = self._draw(f"request {number}", max(0, row.num_prompt - len(begin)))
        return (begin + own)[: row.num_prompt]

    def _draw(self, what: str, num_tokens: int) -> tuple[int, ...]:
        return tuple(random.Random(f"{what} {self._seed}").choices(self._ids, k=num_tokens))


def _request(token_ids: tuple[int, ...], num_output: int, options: PlanOptions) -> GenerateRequest:
    return GenerateRequest(
        input=token_ids,
        seed=options.seed,
        sampling=SamplingParams(
            temperature=0.0, max_tokens=num_output, min_tokens=num_output, ignore_eos=True
        ),
    )
