"""One seed from start to verdict: build the cluster, let everything happen, wait for quiet, check."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

import structlog

from pdserve.engine.fake_rule import FakeRule
from pdserve.engine.fake_runner import FakeFaults
from pdserve.errors import PdserveError
from pdserve.tracing import Tracer
from tests.simulation.client import Client
from tests.simulation.cluster import SimCluster, SimWorker
from tests.simulation.coverage import Coverage
from tests.simulation.faults import Chaos
from tests.simulation.invariants import Verdicts, unrest
from tests.simulation.ledger import Ledger
from tests.simulation.log_watch import LogWatch
from tests.simulation.outages import Outages
from tests.simulation.phases import Sight
from tests.simulation.plan import ROW_POISON, STEP_POISON
from tests.simulation.scenario import BLOCK_SIZE, STARTS_S, Scenario, draw_scenario
from tests.simulation.stage import Stage
from tests.simulation.tape import Tape
from tests.simulation.watch import Watch
from tests.support.virtual_clock import VirtualClock
from tests.support.virtual_loop import Hang, LeftBehind, run_virtual

LIMIT_S = 200.0  # virtual seconds after which a run counts as a hang
QUIET_S = 12.0  # besides the time-outs: reconnects, restarts and their back-offs are over by then
LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class Violation:
    """An invariant that didn't hold. about: the request, if it is one's."""

    what: str
    about: str = ""

    def __str__(self) -> str:
        return self.what


@dataclass(slots=True)
class Result:
    """What came out. `violations` empty: all invariants held."""

    scenario: Scenario
    tape: Tape
    violations: list[Violation] = field(default_factory=list)
    coverage: Coverage = field(default_factory=Coverage)
    ends: Counter[str] = field(default_factory=Counter)
    virtual_s: float = 0.0

    @property
    def seed(self) -> int:
        return self.scenario.seed


def run_seed(seed: int, *, full: bool = False) -> Result:
    """Run the scenario of a seed; never raises for what the cluster does wrong. full: see Tape."""
    return run_scenario(draw_scenario(seed), full=full)


def run_scenario(scenario: Scenario, *, full: bool = False, tracer: Tracer | None = None) -> Result:
    """See run_seed. tracer: of all processes; None = nothing is traced."""
    clock = VirtualClock()
    result = Result(scenario, Tape(clock, full=full))
    try:
        run_virtual(_Run(scenario, clock, result, tracer).play(), clock, limit_s=LIMIT_S)
    except (Hang, LeftBehind) as error:
        result.violations.append(Violation(f"hang: {error}"))
    except (PdserveError, BaseExceptionGroup) as error:
        result.violations.append(Violation(f"raised: {error!r}"))
    finally:
        structlog.reset_defaults()
    result.virtual_s = result.tape.now_s()
    return result


class _Run:
    """Also the Observer of its cluster."""

    def __init__(
        self, scenario: Scenario, clock: VirtualClock, result: Result, tracer: Tracer | None
    ) -> None:
        self._tracer = tracer
        self._scenario = scenario
        self._clock = clock
        self._result = result
        self._tape = result.tape
        self._chaos: Chaos | None = None
        self._watch: Watch | None = None
        self._outages = Outages(self._tape.now_s)

    async def play(self) -> None:
        """The whole run."""
        scenario, tape = self._scenario, self._tape
        cluster = SimCluster(
            scenario.config,
            self._clock,
            scenario.seed,
            router_ids=scenario.router_ids,
            block_size=BLOCK_SIZE,
            window_tokens=scenario.window_tokens,
            delays=scenario.delays,
            device_checksums=scenario.device_checksums,
            rule=FakeRule(eos_one_in=scenario.eos_one_in),
            faults=FakeFaults(
                row_token_ids=frozenset((ROW_POISON,)), step_token_ids=frozenset((STEP_POISON,))
            ),
            skewed=scenario.skewed,
            launches_ahead=scenario.launches_ahead,
            observer=self,
            tape=tape,
            tracer=self._tracer,
        )
        ledger = Ledger(tape.now_s, scenario.config.timeouts.token_gap_s + 1.0)
        stage = Stage(scenario, cluster, tape, ledger, self._result.coverage, Sight(cluster))
        watch = self._watch = Watch(stage)
        clients = [Client(stage, plan, watch.cancelled) for plan in scenario.plans]
        logs = LogWatch(stage, clients)
        logs.configure()
        self._chaos = Chaos(stage, clients)
        async with cluster:
            loop = asyncio.get_running_loop()
            starting = ledger.begin("start", workers=[worker.id for worker in scenario.workers])
            loop.call_later(STARTS_S, ledger.end, starting)
            for worker in scenario.workers:
                cluster.add_worker(
                    worker.id, worker.role, num_blocks=worker.num_blocks, delay_s=worker.starts_s
                )
            watching = loop.create_task(watch.run())
            async with asyncio.TaskGroup() as group:
                group.create_task(self._chaos.run())
                for client in clients:
                    group.create_task(self._at(client))
            await self._quiet(cluster)
            watching.cancel()
            await asyncio.wait((watching,))
        verdicts = Verdicts(stage, self._outages, logs.struck)
        for client in clients:
            verdicts.judge(client.log)
            self._result.ends[",".join(client.log.ends)] += 1

    async def _at(self, client: Client) -> None:
        plan = client.log.plan
        await asyncio.sleep(max(0.0, plan.at_s - self._tape.now_s()))
        self._tape.tell(
            f"{plan.name}: asks {plan.router_id}, {len(plan.prompt_ids)} + {plan.max_tokens} tokens, n {plan.n}",
            about=plan.name,
        )
        await client.run()
        self._tape.tell(f"{plan.name}: {client.log.ends} {client.log.error or ''}", about=plan.name)

    async def _quiet(self, cluster: SimCluster) -> None:
        """Everything must come to rest."""
        timeouts = self._scenario.config.timeouts
        until_s = self._tape.now_s() + QUIET_S + timeouts.link_s + timeouts.lease_s + timeouts.hold_s
        while (rest := next(unrest(cluster), None)) is not None and self._tape.now_s() < until_s:
            await asyncio.sleep(LOOK_S)
        if rest is not None:
            for what in unrest(cluster):
                self.violate(what)

    # --- Observer

    def on_turn(self, worker: SimWorker) -> None:
        counts = worker.counts()
        if counts is not None:
            total = counts.free + counts.granted + counts.owned + counts.cached + counts.quarantined
            least = min(counts.free, counts.granted, counts.owned, counts.cached)
            if total != worker.num_blocks or least < 0:
                self.violate(f"{worker.id}: blocks don't add up: {counts} of {worker.num_blocks}")
        if self._watch is not None:
            self._watch.look_at_cancelled(worker)
        if self._chaos is not None:
            self._chaos.aim.moments.look()

    def on_exit(self, worker: SimWorker, code: int) -> None:
        self._tape.tell(f"{worker.id} exited with {code}")

    def on_failure(self, worker: SimWorker, what: str) -> None:
        self._tape.tell(f"{worker.id}: a {what} was told to fail")

    def on_serving(self, router_id: str, serving: bool) -> None:
        self._outages.on_serving(router_id, serving)

    def violate(self, what: str, about: str = "") -> None:
        self._tape.tell(f"VIOLATION {what}", about=about)
        self._result.violations.append(Violation(what, about))
