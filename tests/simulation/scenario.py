"""What a seed decides: the cluster's shape, its requests and the faults that befall it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from enum import Enum

from pdserve.messages import Role
from pdserve.service.config import Config, RouterConfig, TimeoutsConfig, TransportConfig, WorkerConfig
from tests.simulation.client import Plan
from tests.simulation.cluster import Delays

ROW_POISON = 257  # a prompt with this id loses its row
STEP_POISON = 258  # a prompt with this id breaks the step that computes it
BLOCK_SIZE = 16
HORIZON_S = 12.0  # arrivals and faults begin within it


class Kind(Enum):
    """Faults, by the row of docs/reliability.md that they belong to."""

    KILL_PREFILL = "kill prefill"  # 3, 4, 5, 11
    KILL_DECODE = "kill decode"  # 6, 7, 11
    CUT_LINK = "cut link"  # 8
    STOP_PREFILL = "stop prefill"  # 9
    STOP_DECODE = "stop decode"  # 9
    CORRUPT = "corrupt"  # 10
    TWIN = "second process of one id"  # 12
    KILL_ROUTER = "kill router"  # 13
    RESET_SESSIONS = "reset sessions"  # 14
    CUT_SESSION = "cut session"  # 14
    HANG_PREFILL = "hang prefill engine"  # 15
    HANG_DECODE = "hang decode engine"  # 15
    FAIL_STEP = "fail a step"  # 16
    STRANGER = "incompatible worker joins"  # 21
    DRAIN_PREFILL = "drain prefill"  # 23
    DRAIN_DECODE = "drain decode"  # 23
    DRAIN_ROUTER = "drain router"  # 23
    SWITCH_ROLE = "switch role"
    SLOW = "slow worker"
    JOIN = "worker joins"


class Moment(Enum):
    """The phase that some request on the victim must be in when the fault strikes."""

    ANY = "any"
    QUEUED = "queued"
    GRANTED = "granted"
    PULLING = "pulling"
    COMMITTED = "committed"
    STREAMING = "streaming"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault: from at_s on, as soon as the moment has come; lasts_s until it is mended (None: never)."""

    kind: Kind
    at_s: float
    moment: Moment
    lasts_s: float | None
    draw: float  # which victim, in [0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """All that happens under one seed."""

    seed: int
    config: Config
    delays: Delays
    router_ids: tuple[str, ...]
    workers: tuple[tuple[str, Role], ...]
    num_blocks: int
    plans: tuple[Plan, ...]
    faults: tuple[Fault, ...]
    corrupt_from: str = ""  # worker whose outgoing pieces are corrupted now and then
    start_order: tuple[float, ...] = field(default=())


def draw_scenario(seed: int) -> Scenario:
    """The scenario of a seed: a pure function."""
    source = random.Random(f"scenario/{seed}")
    num_routers = source.choice((1, 1, 2, 2, 3, 4))
    router_ids = tuple(f"r{index}" for index in range(num_routers))
    workers = _draw_workers(source)
    longest = source.choice((48, 96, 192, 320))
    one_sequence = -(-(longest + 1) // BLOCK_SIZE) + 1
    num_blocks = one_sequence * source.choice((1, 2, 4, 16))
    plans = _draw_plans(source, router_ids, longest)
    faults = _draw_faults(source, num_routers)
    corrupts = any(fault.kind is Kind.CORRUPT for fault in faults)
    prefills = [name for name, role in workers if role is Role.PREFILL]
    return Scenario(
        seed=seed,
        config=_draw_config(source),
        delays=_draw_delays(source),
        router_ids=router_ids,
        workers=workers,
        num_blocks=num_blocks,
        plans=plans,
        faults=faults,
        corrupt_from=source.choice(prefills) if corrupts else "",
        start_order=tuple(0.5 * source.random() for _ in workers),
    )


def _draw_workers(source: random.Random) -> tuple[tuple[str, Role], ...]:
    workers = [(f"p{index}", Role.PREFILL) for index in range(source.choice((2, 2, 3)))]
    workers += [(f"d{index}", Role.DECODE) for index in range(source.choice((2, 3, 4)))]
    if source.random() < 0.2:
        workers.append(("b0", Role.BOTH))
    return tuple(workers)


def _draw_config(source: random.Random) -> Config:
    return Config(
        timeouts=TimeoutsConfig(drain_s=source.choice((2.0, 10.0, 60.0)), request_s=300.0),
        router=RouterConfig(
            max_queued_requests=source.choice((6, 64, 1024)),
            pairs_per_prefill=source.choice((1, 2, 8)),
            allow_local_prefill=source.random() < 0.3,
        ),
        worker=WorkerConfig(
            queue_tokens=source.choice((256, 1024, 16384)), max_waiting=source.choice((1, 4, 64))
        ),
        transport=TransportConfig(pull_window_bytes=source.choice((4096, 16384, 16 << 20)), piece_bytes=4096),
    )


def _draw_delays(source: random.Random) -> Delays:
    slow = source.choice((1.0, 1.0, 5.0, 20.0))
    one_sided = source.random() < 0.3
    return Delays(
        session_s=0.002 * slow,
        link_s=0.002 * slow,
        owner_s=0.002 * slow,
        one_sided=one_sided,
        copy_s=0.004 * slow if one_sided and source.random() < 0.5 else None,
    )


def _draw_plans(source: random.Random, router_ids: tuple[str, ...], longest: int) -> tuple[Plan, ...]:
    num_plans = source.randint(30, 44)
    bursts = source.random() < 0.4
    prefixes = [_draw_ids(source, source.randint(16, max(17, longest // 2))) for _ in range(3)]
    poison = source.choice((None, None, ROW_POISON, STEP_POISON))
    plans = []
    for index in range(num_plans):
        at_s = source.choice((1.0, 4.0, 8.0)) + 0.05 * source.random() if bursts else HORIZON_S * source.random()
        plans.append(_draw_plan(source, f"q{index}", at_s, router_ids, longest, prefixes, poison))
    return tuple(sorted(plans, key=lambda plan: plan.at_s))


def _draw_plan(
    source: random.Random,
    name: str,
    at_s: float,
    router_ids: tuple[str, ...],
    longest: int,
    prefixes: list[tuple[int, ...]],
    poison: int | None,
) -> Plan:
    num_prompt = source.randint(1, longest - 8)
    ids = _draw_ids(source, num_prompt)
    if source.random() < 0.4:
        ids = (source.choice(prefixes) + ids)[:num_prompt]
    poisoned = poison is not None and source.random() < 0.06
    if poisoned:
        assert poison is not None, "just asked"
        place = source.randrange(num_prompt)
        ids = (*ids[:place], poison, *ids[place + 1 :])
    draw = source.random()
    return Plan(
        name=name,
        at_s=at_s,
        router_id=source.choice(router_ids),
        prompt_ids=ids,
        max_tokens=source.randint(1, longest - num_prompt),
        n=source.choice((2, 3)) if source.random() < 0.1 else 1,
        greedy=source.random() < 0.3,
        priority=source.choice((0, 0, 0, 1, 5)),
        user=source.choice(("", "ann", "bob")),
        stop=(source.choice(("ab", "z", "xyz", ".")),) if source.random() < 0.1 else (),
        deadline_s=source.choice((0.05, 0.5, 3.0)) if 0.1 < draw < 0.22 else None,
        cancel_after_s=source.choice((0.01, 0.1, 0.5, 2.0)) * source.random() if draw < 0.1 else None,
        reads_slowly_s=40.0 if draw > 0.98 else 0.0,
        poisoned=poisoned,
    )


def _draw_ids(source: random.Random, num_ids: int) -> tuple[int, ...]:
    return tuple(source.randint(32, 126) for _ in range(num_ids))


def _draw_faults(source: random.Random, num_routers: int) -> tuple[Fault, ...]:
    kinds = [kind for kind in Kind if num_routers > 1 or kind is not Kind.DRAIN_ROUTER]
    faults = []
    for _ in range(source.randint(3, 6)):
        moment = source.choice(tuple(Moment)) if source.random() < 0.75 else Moment.ANY
        faults.append(
            Fault(
                kind=source.choice(kinds),
                at_s=0.5 + (HORIZON_S - 0.5) * source.random(),
                moment=moment,
                lasts_s=source.choice((0.2, 1.0, 3.0, 7.0)) * (0.5 + source.random()),
                draw=source.random(),
            )
        )
    return tuple(sorted(faults, key=lambda fault: fault.at_s))
