"""What a seed decides: the cluster's shape, its requests and the faults that befall it."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from pdserve.kv_memory import XXH3_64
from pdserve.messages import Role
from pdserve.service.config import (
    Config,
    EngineConfig,
    TimeoutsConfig,
    TransportConfig,
    WorkerConfig,
)
from pdserve.service.router_config import RouterConfig
from tests.simulation.cluster import Delays
from tests.simulation.coverage import AIMS
from tests.simulation.kinds import Fault, Kind, Moment
from tests.simulation.plan import STEP_POISON, Plan, Traffic, draw_plans
from tests.support.memory_channel import WireKind

BLOCK_SIZE = 16
SPAN_S = 2.5  # requests arrive, and faults begin, within it
STARTS_S = 0.4  # workers start within it


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    """One worker and its machine."""

    id: str
    role: Role
    num_blocks: int
    starts_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """All that happens under one seed.

    eos_one_in      see FakeRule
    skewed          each process has clocks of its own
    launches_ahead  engines compute as on a device: the next step is launched before the last one is read
    """

    seed: int
    config: Config
    delays: Delays
    router_ids: tuple[str, ...]
    workers: tuple[WorkerPlan, ...]
    plans: tuple[Plan, ...]
    faults: tuple[Fault, ...]
    window_tokens: int
    eos_one_in: int
    skewed: bool
    launches_ahead: bool

    @property
    def device_checksums(self) -> tuple[str, ...]:
        """Devices compute none where nothing is corrupted: what goes wrong then shows in the text."""
        return (XXH3_64,) if any(fault.kind is Kind.CORRUPT for fault in self.faults) else ()


def draw_scenario(seed: int) -> Scenario:
    """The scenario of a seed: a pure function. Its first fault is aimed at the next cell of the coverage table."""
    source = random.Random(f"scenario/{seed}")
    kind, moment = AIMS[seed % len(AIMS)]
    num_routers = source.choice((1, 1, 2, 2, 3, 4))
    router_ids = tuple(f"r{index}" for index in range(num_routers))
    longest = source.choice((192, 320) if moment is Moment.PULLING else (48, 96, 192, 320))
    slow = source.choice((1.0, 1.0, 3.0, 10.0))
    if kind is Kind.CORRUPT and moment is Moment.PULLING:
        slow, longest = 1.0, 320  # or COMMIT, which waits for no piece, overtakes all of them
    config = _draw_config(
        source, slow, short_patience=kind is Kind.DEAF_CLIENT, small_steps=moment is Moment.PULLING
    )
    traffic = Traffic(
        router_ids=router_ids,
        longest=longest,
        span_s=SPAN_S,
        in_bursts=moment is Moment.QUEUED or kind is Kind.DRAIN_DECODE or source.random() < 0.4,
        long_answers=kind in (Kind.DEAF_CLIENT, Kind.DRAIN_DECODE)
        or (moment in (Moment.STREAMING, Moment.DRAINING) and source.random() < 0.7),
        slow_client_s=1.5 * config.timeouts.client_stall_s,
    )
    delays = _draw_delays(source, slow)
    if delays.kind in (WireKind.NCCL, WireKind.CUDA_IPC):
        config = replace(config, transport=replace(config.transport, kinds=(delays.kind.value, "stream")))
    workers = _draw_workers(source, longest, tight=moment is Moment.QUEUED or kind is Kind.DRAIN_DECODE)
    plans, faults = draw_plans(source, traffic), _draw_faults(source, kind, moment)
    return Scenario(
        seed=seed,
        config=config,
        delays=delays,
        router_ids=router_ids,
        workers=workers,
        plans=plans,
        faults=faults,
        window_tokens=source.choice((longest, 4096)),
        eos_one_in=source.choice((0, 0, 40)),
        skewed=source.random() < 0.7,
        launches_ahead=_draw_ahead(seed, plans, faults),
    )


def _draw_ahead(seed: int, plans: tuple[Plan, ...], faults: tuple[Fault, ...]) -> bool:
    """Apart from all else that a seed decides. A step that fails ends a device's process, as KILL does: not here."""
    if any(fault.kind in (Kind.FAIL_STEP_PREFILL, Kind.FAIL_STEP_DECODE) for fault in faults):
        return False
    return all(plan.poison != STEP_POISON for plan in plans) and random.Random(f"ahead/{seed}").random() < 0.5


def _draw_workers(source: random.Random, longest: int, *, tight: bool) -> tuple[WorkerPlan, ...]:
    roles = [(f"p{index}", Role.PREFILL) for index in range(source.choice((2, 2, 3)))]
    roles += [(f"d{index}", Role.DECODE) for index in range(source.choice((2, 2, 3, 4)))]
    if source.random() < 0.15:
        roles.append(("b0", Role.BOTH))
    one_sequence = -(-(longest + 1) // BLOCK_SIZE)
    sizes = (1, 1, 2) if tight else source.choice(((1,), (2,), (1, 2, 4), (4,), (16,)))
    return tuple(
        WorkerPlan(
            id=worker_id,
            role=role,
            num_blocks=one_sequence * source.choice(sizes) + source.choice((0, 1, 3)),
            starts_s=STARTS_S * source.random(),
        )
        for worker_id, role in roles
    )


def _draw_config(source: random.Random, slow: float, *, short_patience: bool, small_steps: bool) -> Config:
    scale = source.choice((0.25, 0.25, 0.5)) if slow < 10.0 else source.choice((0.5, 1.0))
    return Config(
        timeouts=TimeoutsConfig(
            keepalive_s=1.0 * scale,
            grant_s=1.0 * scale,
            link_s=4.0 * scale,
            lease_s=5.0 * scale,
            handoff_s=6.0 * scale,
            prefill_progress_s=10.0 * scale,
            token_gap_s=10.0 * scale,
            hold_s=5.0 * scale,
            client_stall_s=0.05 if short_patience else source.choice((0.5, 2.0)),
            worker_wait_s=source.choice((1.0, 4.0, 10.0)),
            drain_s=source.choice((0.3, 2.0, 5.0)),
            request_s=60.0,
            heartbeat_s=min(0.5, scale),
        ),
        router=RouterConfig(
            max_queued_requests=source.choice((4, 16, 1024)),
            pairs_per_prefill=source.choice((1, 2, 8)),
            allow_local_prefill=source.random() < 0.3,
        ),
        worker=WorkerConfig(
            queue_tokens=source.choice((256, 1024, 16384)), max_waiting=source.choice((1, 4, 64))
        ),
        engine=EngineConfig(
            max_step_tokens=source.choice((24,) if small_steps else (24, 64, 512)),
            max_batch=source.choice((2, 8, 64)),
        ),
        transport=TransportConfig(pull_window_bytes=source.choice((4096, 16384, 16 << 20)), piece_bytes=4096),
    )


def _draw_delays(source: random.Random, slow: float) -> Delays:
    draw = source.random()
    bounds = (
        (0.2, WireKind.ONE_SIDED),
        (0.3, WireKind.CUDA_IPC),
        (0.4, WireKind.POSTED),
        (0.5, WireKind.NCCL),
        (0.6, WireKind.STAGED),
        (1.0, WireKind.TWO_SIDED),
    )
    kind = next(kind for bound, kind in bounds if draw < bound)
    return Delays(
        session_s=0.002 * slow,
        link_s=0.002 * slow,
        owner_s=0.002 * slow,
        kind=kind,
        copy_s=0.004 * slow if kind is WireKind.ONE_SIDED and source.random() < 0.5 else None,
    )


def _draw_faults(source: random.Random, kind: Kind, moment: Moment) -> tuple[Fault, ...]:
    faults = [_draw_fault(source, kind, moment)]
    for _ in range(source.randint(2, 4)):
        faults.append(_draw_fault(source, *source.choice(AIMS)))
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


def _draw_fault(source: random.Random, kind: Kind, moment: Moment) -> Fault:
    span_s = (SPAN_S - STARTS_S) * (
        0.4 if kind is Kind.KILL_UNHEARD else 1.0
    )  # which takes a while to be done
    return Fault(
        kind=kind,
        at_s=STARTS_S + span_s * source.random(),
        moment=moment,
        lasts_s=source.choice((0.1, 0.5, 1.5, 4.0)) * (0.5 + source.random()),
        draw=source.random(),
    )
