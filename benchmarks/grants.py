"""What a hand-off costs a client while the decode worker is busy, and what a small pool keeps of its cache.

    python -m benchmarks.grants [--seeds 3]
    python -m benchmarks.grants --model smollm2-135m [--visits 100] [--rate 0.3]      (or --model fake)

Without --model: a simulated cluster of one prefill and one decode worker under virtual time, the real classes with
steps that take what SmolLM2's take on two cores. Seeded, exact, the same on every machine. With it: the first part on
real processes, with the machine's own times.

first gap  token 0 → token 1 at the client, while 8 streams decode (a step: 40 ms) and prompts come at random. exposed:
           of it, the last bytes behind COMMIT; commit: until CONFIRM; queue: until the step that makes token 1 begins
cache      conversations with a common beginning, whose decode worker has too few blocks for all: hits are prompt
           tokens that needn't be sent, because the decode worker still had them. busy: long prompts of others come
           between, so that all queue at the prefill worker while their grants hold blocks
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import math
import os
import random
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from deploy.demo.cluster import running_cluster
from pdserve.client import AsyncClient
from pdserve.clock import Clock, SystemClock
from pdserve.engine.port import Row
from pdserve.messages import Role
from pdserve.request import Event, Finished, GenerateRequest, Tokens
from pdserve.response import Timings
from pdserve.sampling import SamplingParams
from pdserve.service.config import Config
from tests.simulation.cluster import Delays, SimCluster, SimWorker
from tests.simulation.observer import Observer, Unobserved
from tests.support.virtual_clock import VirtualClock
from tests.support.virtual_loop import run_virtual

JOIN_S = 2.0
LIMIT_S = 36_000.0
DELAYS = Delays(session_s=0.001, link_s=0.0005, owner_s=0.0002)
PREFILL_TOKEN_S, DECODE_S, DECODE_ROW_S = 0.0007, 0.032, 0.001
NUM_BLOCKS = 4096

NUM_STREAMS, STREAM_TOKENS = 8, 400
NUM_VISITS = 300
ONE_CHUNK = 512
VISIT_PROMPTS = (48, 200, 480, 1200)  # the last in three chunks
VISIT_TOKENS = 6

NUM_TALKS, NUM_TURNS = 24, 8
COMMON_TOKENS, FIRST_TOKENS, TURN_TOKENS, ANSWER_TOKENS = 256, 160, 96, 48
THINKING_S = 6.0
LONG_TOKENS, LONG_A_SECOND = 1200, 0.7
POOLS = (160, 320, 640, 1280)  # blocks of the decode worker; all talks at their end need about 1,700
BUSY_POOLS = POOLS[1:]


def step_s(rows: Sequence[Row]) -> float:
    """Seconds of a step: prompts by their tokens; decoding reads the weights once, and a little for each sequence."""
    num_prompt = sum(len(row.token_ids) for row in rows if len(row.token_ids) > 1)
    num_decoding = sum(1 for row in rows if len(row.token_ids) == 1)
    return num_prompt * PREFILL_TOKEN_S + (DECODE_S + num_decoding * DECODE_ROW_S if num_decoding else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One request as its client saw it."""

    num_prompt: int
    token_ids: list[int]
    timings: Timings
    first_gap_s: float
    gaps_s: list[float]


class Asker:
    """Asks a router, simulated or real."""

    def __init__(self, generate: Callable[[GenerateRequest], AsyncIterator[Event]], clock: Clock) -> None:
        self._generate = generate
        self._clock = clock

    async def ask(self, prompt: tuple[int, ...], max_tokens: int) -> Answer:
        """A whole answer of max_tokens tokens."""
        came_s: list[float] = []
        token_ids: list[int] = []
        timings = Timings()
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        async for event in self._generate(GenerateRequest(input=prompt, sampling=sampling)):
            if isinstance(event, Tokens):
                token_ids += event.token_ids
                came_s += [self._clock.now_s()] * len(event.token_ids)
            elif isinstance(event, Finished):
                timings = event.timings
        first_gap_s, *gaps_s = [later - earlier for earlier, later in itertools.pairwise(came_s)]
        return Answer(
            num_prompt=len(prompt),
            token_ids=token_ids,
            timings=timings,
            first_gap_s=first_gap_s,
            gaps_s=gaps_s,
        )


async def stop(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Tasks that would go on for ever; the error of one that has failed is raised."""
    for task in tasks:
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*tasks)


def drawn_prompt(source: random.Random, num_tokens: int) -> tuple[int, ...]:
    return tuple(source.choices(range(32, 127), k=num_tokens))


# --- first gaps


@dataclass(slots=True)
class Gaps:
    """The visits, and the gaps of the streams beside them."""

    visits: list[Answer] = field(default_factory=list)
    stream_gaps_s: list[float] = field(default_factory=list)

    async def measure(
        self, asker: Asker, random_for: Callable[[str], random.Random], num_visits: int, a_second: float
    ) -> None:
        """Let visitors come while the streams run, so many a second in the mean."""
        source = random_for("visits")

        async def stream(prompts: random.Random) -> None:
            while True:
                answer = await asker.ask(drawn_prompt(prompts, 64), STREAM_TOKENS)
                self.stream_gaps_s.extend(answer.gaps_s)

        async def visit(prompt: tuple[int, ...]) -> None:
            self.visits.append(await asker.ask(prompt, VISIT_TOKENS))

        streams = [asyncio.create_task(stream(random_for(f"stream {index}"))) for index in range(NUM_STREAMS)]
        async with asyncio.TaskGroup() as group:
            for _ in range(num_visits):
                await asyncio.sleep(source.expovariate(a_second))
                group.create_task(visit(drawn_prompt(source, source.choice(VISIT_PROMPTS))))
        await stop(streams)

    def print(self) -> None:
        print(f"{'milliseconds':36}{'p50':>9}{'p90':>9}{'p99':>9}{'mean':>9}{'n':>8}")
        for name, some in (
            ("prompts of one chunk", [each for each in self.visits if each.num_prompt <= ONE_CHUNK]),
            ("prompts of three chunks", [each for each in self.visits if each.num_prompt > ONE_CHUNK]),
        ):
            if not some:
                continue
            print(name)
            rows = {
                "time to first token": [each.timings.ttft_ms / 1e3 for each in some],
                "first gap": [each.first_gap_s for each in some],
                "  exposed": [each.timings.transfer_exposed_ms / 1e3 for each in some],
                "  commit": [each.timings.commit_ms / 1e3 for each in some],
                "  queue": [each.timings.decode_queue_ms / 1e3 for each in some],
                "  step": [each.timings.decode_step_ms / 1e3 for each in some],
            }
            for what, values in rows.items():
                print(f"  {what:34}{quantiles(values)}{len(values):8}")
        print(f"{'gaps of the streams':36}{quantiles(self.stream_gaps_s)}{len(self.stream_gaps_s):8}")


def quantiles(values: Sequence[float]) -> str:
    """p50, p90, p99 and mean, in milliseconds."""
    ordered = sorted(values)
    at = [ordered[math.ceil(share * len(ordered)) - 1] for share in (0.5, 0.9, 0.99)]
    return "".join(f"{1000 * value:9.1f}" for value in (*at, sum(ordered) / len(ordered)))


# --- the cache


@dataclass(slots=True)
class CacheFigures:
    """What a decode worker's pool of one size kept."""

    num_hit_tokens: int = 0
    num_query_tokens: int = 0
    num_revocations: int = 0
    num_preemptions: int = 0
    took_s: float = 0.0
    answers: list[Answer] = field(default_factory=list)


def cache_kept(seed: int, num_blocks: int, *, busy: bool) -> CacheFigures:
    """Conversations, each turn of which repeats all before it."""
    figures = CacheFigures()

    async def talk(cluster: SimCluster, asker: Asker) -> None:
        common = drawn_prompt(cluster.random_for("common"), COMMON_TOKENS)

        async def ask_long() -> None:
            source = cluster.random_for("long ones")
            async with asyncio.TaskGroup() as group:
                while True:
                    await asyncio.sleep(source.expovariate(LONG_A_SECOND))
                    group.create_task(asker.ask(drawn_prompt(source, LONG_TOKENS), VISIT_TOKENS))

        async def converse(source: random.Random) -> None:
            said = common + drawn_prompt(source, source.randint(1, 2 * FIRST_TOKENS))
            for _ in range(NUM_TURNS):
                await asyncio.sleep(source.expovariate(1 / THINKING_S))
                answer = await asker.ask(said, ANSWER_TOKENS)
                figures.answers.append(answer)
                said += (*answer.token_ids, *drawn_prompt(source, source.randint(1, 2 * TURN_TOKENS)))

        begun_s = cluster.clock.now_s()
        others = [asyncio.create_task(ask_long())] if busy else []
        async with asyncio.TaskGroup() as group:
            for index in range(NUM_TALKS):
                group.create_task(converse(cluster.random_for(f"talk {index}")))
        await stop(others)
        figures.took_s = cluster.clock.now_s() - begun_s
        await asyncio.sleep(2.0)  # the last report of all is here
        app = cluster.routers["r0"].app
        assert app is not None
        load = next(member.accounting.load for member in app.fleet.members if member.id == "d0")
        assert load is not None
        figures.num_hit_tokens = load.num_cache_hit_tokens
        figures.num_query_tokens = load.num_cache_query_tokens

    watch = PreemptionWatch()
    with counted_events() as events:
        on_simulated_pair(f"talks/{seed}", num_blocks, talk, watch)
    figures.num_revocations = events["grant.revoked"]
    figures.num_preemptions = watch.num_preemptions
    return figures


def print_cache(num_seeds: int) -> None:
    head = "".join(f"{name:>11}" for name in ("blocks", "hit tokens", "of", "revoked", "preempted", "took s"))
    print(f"\n{'':5}{head}   time to first token: p50, p90, p99, mean, ms")
    for name, num_blocks in (*(("", each) for each in POOLS), *(("busy", each) for each in BUSY_POOLS)):
        each = [cache_kept(seed, num_blocks, busy=bool(name)) for seed in range(num_seeds)]
        sums = [
            sum(one.num_hit_tokens for one in each),
            sum(one.num_query_tokens for one in each),
            sum(one.num_revocations for one in each),
            sum(one.num_preemptions for one in each),
        ]
        took_s = sum(one.took_s for one in each) / len(each)
        ttft = quantiles([answer.timings.ttft_ms / 1e3 for one in each for answer in one.answers])
        figures = "".join(f"{value:11}" for value in (num_blocks, *sums))
        print(f"{name:5}{figures}{took_s:11.1f}   {ttft}", flush=True)


# --- clusters


class PreemptionWatch(Unobserved):
    """Counts the sequences that lost their blocks on the decode worker."""

    def __init__(self) -> None:
        self.num_preemptions = 0
        self._num_preempted = 0

    def on_turn(self, worker: SimWorker) -> None:
        run = None if worker.worker is None else worker.worker.current
        if run is not None and worker.id == "d0":
            self.num_preemptions += max(0, run.engine.num_preempted - self._num_preempted)
            self._num_preempted = run.engine.num_preempted


@contextlib.contextmanager
def counted_events() -> Iterator[Counter[str]]:
    """How often each thing was logged; nothing is written."""
    events = Counter[str]()

    def count(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        events[event["event"]] += 1
        raise structlog.DropEvent

    structlog.configure(processors=[count])
    try:
        yield events
    finally:
        structlog.reset_defaults()


def on_simulated_pair(
    seed: str,
    num_blocks: int,
    talk: Callable[[SimCluster, Asker], Awaitable[None]],
    observer: Observer | None = None,
) -> None:
    """A pair with a decode worker of so many blocks, for the length of a talk."""
    clock = VirtualClock()

    async def play() -> None:
        cluster = SimCluster(Config(), clock, seed, delays=DELAYS, step_s=step_s, observer=observer)
        async with cluster:
            cluster.add_worker("p0", Role.PREFILL, num_blocks=NUM_BLOCKS)
            cluster.add_worker("d0", Role.DECODE, num_blocks=num_blocks)
            await asyncio.sleep(JOIN_S)
            app = cluster.routers["r0"].app
            assert app is not None, "the router runs"
            await talk(cluster, Asker(app.generate, clock))

    run_virtual(play(), clock, limit_s=LIMIT_S)


def simulate(num_seeds: int, num_visits: int, a_second: float) -> None:
    """Both parts under virtual time."""
    gaps = Gaps()

    async def visits(cluster: SimCluster, asker: Asker) -> None:
        await gaps.measure(asker, cluster.random_for, num_visits, a_second)

    with counted_events():
        for seed in range(num_seeds):
            on_simulated_pair(f"gaps/{seed}", NUM_BLOCKS, visits)
    gaps.print()
    print_cache(num_seeds)


async def measure(model: str, num_visits: int, a_second: float) -> None:
    """The first part on real processes."""
    what = ("--engine", "fake") if model == "fake" else ("--model", model)
    gaps, load = Gaps(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="pdserve-grants-") as folder:
        up = (*what, "--prefill", "1", "--decode", "1", "--router.allow-local-prefill", "false")
        async with running_cluster(Path(folder), up) as cluster, AsyncClient(cluster.target) as client:
            await gaps.measure(
                Asker(client.generate, SystemClock()),
                lambda name: random.Random(f"0/{name}"),
                num_visits,
                a_second,
            )
    print(f"{model}, {os.cpu_count()} cores, load {load:.1f} before, {os.getloadavg()[0]:.1f} after")
    gaps.print()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--visits", type=int, default=NUM_VISITS)
    parser.add_argument(
        "--rate", type=float, default=1.0, help="visits a second; what the machine can prefill"
    )
    parser.add_argument("--model", help="alias, folder or .gguf file, or fake: measure on real processes")
    arguments = parser.parse_args()
    if arguments.model is None:
        simulate(arguments.seeds, arguments.visits, arguments.rate)
    else:
        asyncio.run(measure(arguments.model, arguments.visits, arguments.rate))


if __name__ == "__main__":
    main()
