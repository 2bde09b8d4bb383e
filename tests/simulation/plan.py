"""What one client asks for and does."""

from __future__ import annotations

import random
from dataclasses import dataclass

ROW_POISON = 257  # a prompt with this id loses its row
STEP_POISON = 258  # a prompt with this id breaks the step that computes it


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """reads_slowly_s  pause between two events, until the router gives it up"""

    name: str
    at_s: float
    router_id: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    n: int = 1
    greedy: bool = False
    priority: int = 0
    user: str = ""
    stop: tuple[str, ...] = ()
    deadline_s: float | None = None
    cancel_after_s: float | None = None
    reads_slowly_s: float = 0.0
    poison: int | None = None
    is_bad: bool = False  # over the window: refused before anything is reserved

    @property
    def is_plain(self) -> bool:
        """Nothing about it is a reason not to succeed."""
        return not (
            self.deadline_s is not None
            or self.cancel_after_s is not None
            or self.reads_slowly_s
            or self.poison
            or self.is_bad
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """How requests are drawn. longest: prompt and answer together; span_s: they arrive within it."""

    router_ids: tuple[str, ...]
    longest: int
    span_s: float
    in_bursts: bool
    long_answers: bool
    slow_client_s: float


def draw_plans(source: random.Random, traffic: Traffic) -> tuple[Plan, ...]:
    """At least 30 requests, by arrival."""
    num_plans = source.randint(30, 40)
    prefixes = [_draw_ids(source, source.randint(16, max(17, traffic.longest // 2))) for _ in range(3)]
    poison = source.choice((None, None, ROW_POISON, STEP_POISON))
    bursts_s = [traffic.span_s * source.random() for _ in range(2)]
    plans = []
    for index in range(num_plans):
        if traffic.in_bursts:
            at_s = source.choice(bursts_s) + 0.02 * source.random()
        else:
            at_s = traffic.span_s * source.random()
        plans.append(_draw_plan(source, f"q{index}", at_s, traffic, prefixes, poison))
    return tuple(sorted(plans, key=lambda plan: plan.at_s))


def _draw_plan(
    source: random.Random,
    name: str,
    at_s: float,
    traffic: Traffic,
    prefixes: list[tuple[int, ...]],
    poison: int | None,
) -> Plan:
    longest = traffic.longest
    num_prompt = source.randint(1, source.choice((longest // 3, longest - 8)))
    ids = _draw_ids(source, num_prompt)
    if source.random() < 0.4:
        ids = (source.choice(prefixes) + ids)[:num_prompt]
    poisoned = poison is not None and source.random() < 0.06
    if poisoned:
        assert poison is not None, "just asked"
        place = source.randrange(num_prompt)
        ids = (*ids[:place], poison, *ids[place + 1 :])
    room = longest - num_prompt
    most = source.choice((8, 24, 96) if traffic.long_answers else (1, 3, 8, 16, 32))
    odd, how = source.random(), source.random()
    return Plan(
        name=name,
        at_s=at_s,
        router_id=source.choice(traffic.router_ids),
        prompt_ids=ids,
        max_tokens=source.randint(1, min(room, most)),
        n=source.choice((2, 3)) if source.random() < 0.08 else 1,
        greedy=source.random() < 0.3,
        priority=source.choice((0, 0, 0, 1, 5)),
        user=source.choice(("", "ann", "bob")),
        stop=(source.choice(("ab", "z", "xyz", ".")),) if source.random() < 0.1 else (),
        deadline_s=source.choice((0.03, 0.3, 1.5)) * (0.5 + how) if 0.1 < odd < 0.2 else None,
        cancel_after_s=source.choice((0.01, 0.05, 0.2, 0.8)) * how if odd < 0.1 else None,
        reads_slowly_s=traffic.slow_client_s if 0.2 < odd < 0.24 else 0.0,
        poison=poison if poisoned else None,
        is_bad=0.24 < odd < 0.25,
    )


def _draw_ids(source: random.Random, num_ids: int) -> tuple[int, ...]:
    return tuple(source.choices(range(32, 127), k=num_ids))
