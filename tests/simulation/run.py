"""One seed from start to verdict: build the cluster, let everything happen, wait for quiet, check."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import structlog

from pdserve.clock import VirtualClock
from pdserve.engine.fake_runner import FakeFaults
from pdserve.errors import PdserveError
from pdserve.messages import BlockCounts
from tests.simulation.client import Client
from tests.simulation.cluster import SimCluster
from tests.simulation.faults import Chaos, Coverage
from tests.simulation.invariants import end_violations, rest_violations
from tests.simulation.scenario import ROW_POISON, STEP_POISON, Scenario, draw_scenario
from tests.support.virtual_loop import Hang, LeftBehind, run_virtual

LIMIT_S = 900.0  # virtual seconds after which a run counts as a hang
QUIET_S = 14.0  # link_s, lease_s, hold_s and back-offs are over by then


@dataclass(slots=True)
class Result:
    """What came out. `violations` empty: all invariants held."""

    seed: int
    violations: list[str] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)
    coverage: Coverage = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    num_requests: int = 0
    virtual_s: float = 0.0


def run_seed(seed: int) -> Result:
    """Run the scenario of a seed; never raises for what the cluster does wrong."""
    return run_scenario(draw_scenario(seed))


def run_scenario(scenario: Scenario) -> Result:
    """See run_seed."""
    result = Result(scenario.seed, num_requests=len(scenario.plans))
    clock = VirtualClock()
    begun_s = clock.now_s()

    def tell(line: str) -> None:
        result.trace.append(f"{clock.now_s() - begun_s:10.6f} {line}")

    _capture_logs(tell, result)
    try:
        run_virtual(_play(scenario, clock, tell, result), clock, limit_s=LIMIT_S)
    except (Hang, LeftBehind) as error:
        result.violations.append(f"hang: {error}")
    except (PdserveError, BaseExceptionGroup) as error:
        result.violations.append(f"raised: {error!r}")
    finally:
        structlog.reset_defaults()
    result.virtual_s = clock.now_s() - begun_s
    return result


async def _play(scenario: Scenario, clock: VirtualClock, tell: Any, result: Result) -> None:
    def check_blocks(worker_id: str, counts: BlockCounts, num_blocks: int) -> None:
        total = counts.free + counts.granted + counts.owned + counts.cached + counts.quarantined
        if total != num_blocks or min(counts.free, counts.granted, counts.owned, counts.promised) < 0:
            result.violations.append(f"{worker_id}: blocks don't add up: {counts} of {num_blocks}")

    cluster = SimCluster(
        scenario.config,
        clock,
        scenario.seed,
        router_ids=scenario.router_ids,
        num_blocks=scenario.num_blocks,
        delays=scenario.delays,
        faults=FakeFaults(row_token_ids=frozenset((ROW_POISON,)), step_token_ids=frozenset((STEP_POISON,))),
        check_blocks=check_blocks,
        on_exit=lambda worker_id, code: tell(f"{worker_id} exited with {code}"),
    )
    clients = [Client(cluster, plan) for plan in scenario.plans]
    async with cluster:
        begun_s = clock.now_s()
        for (worker_id, role), delay_s in zip(scenario.workers, scenario.start_order, strict=True):
            cluster.add_worker(worker_id, role, delay_s=delay_s)
        chaos = Chaos(cluster, scenario, tell, result.coverage)
        async with asyncio.TaskGroup() as group:
            group.create_task(chaos.run())
            for client in clients:
                group.create_task(_at(begun_s, client, clock, tell))
        await asyncio.sleep(QUIET_S)
        result.violations += rest_violations(cluster)
    for client in clients:
        result.violations += end_violations(client.log, scenario)
        result.ends[",".join(client.log.ends)] += 1


async def _at(begun_s: float, client: Client, clock: VirtualClock, tell: Any) -> None:
    plan = client.log.plan
    await asyncio.sleep(max(0.0, begun_s + plan.at_s - clock.now_s()))
    tell(f"{plan.name}: asks {plan.router_id}, {len(plan.prompt_ids)} + {plan.max_tokens} tokens, n {plan.n}")
    await client.run()
    tell(f"{plan.name}: {client.log.ends} {client.log.error or ''}")


def _capture_logs(tell: Any, result: Result) -> None:
    """Every log line becomes a line of the trace; a broken invariant in it is a violation."""

    def capture(logger: Any, name: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
        line = " ".join(f"{key}={_short(value)}" for key, value in event.items() if key != "event")
        tell(f"{event['event']} {line}")
        if event["event"] in ("owner.died", "request.crashed") or event.get("error") == "InvariantViolated":
            result.violations.append(f"log: {event['event']} {line}")
        raise structlog.DropEvent

    structlog.configure(
        processors=[capture],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        cache_logger_on_first_use=False,
    )


def _short(value: object) -> str:
    if isinstance(value, BaseException):
        return f"{type(value).__name__}({value})"
    return str(value)
