"""A long run of a cluster under everything at once: `make soak`.

Two routers and six workers, real processes with pools so small that sequences are preempted. First requests of all
kinds are answered undisturbed; then they come again and again, many at a time, while workers are killed, stopped,
leave, join and change their roles, one router is killed now and then, clients leave in mid-stream, and others send
what is cheap to send and dear to read. Each answer must be the undisturbed one, nobody may hold anything for anybody at
the end, and the processes that lived through it all must not have grown. Before and behind it, all that is dear to read
is sent once, so that memory which only the first time takes isn't taken for a leak. Prints what was done and measured;
exit code 1 if anything wasn't as it must be.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import sys
import tempfile
from collections import Counter
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import grpc
import grpc.aio

from pdserve.client import AsyncClient
from pdserve.completion import collect
from pdserve.errors import DeadlineExceeded, Overloaded
from pdserve.operator_client import OperatorClient
from pdserve.request import Tokens
from tests.soak.book import Page, write_book
from tests.soak.growth import has_grown
from tests.support.asking import at_rest, status_of
from tests.support.attacks import ATTACKS, Attack
from tests.support.churn import Churn
from tests.support.footprint import Footprint
from tests.support.singles import Single, Singles
from tests.support.waiting import until

NUM_AT_ONCE = 24
NUM_PAGES = 150
NUM_PREFILL, NUM_DECODE = 3, 3
ROUTERS_DIE_EACH = 10  # things that happen to workers
# Ten processes on few cores: what is a sign of death on a machine of one's own is one of load here.
FLAGS = ("--timeouts.grant-s", "4", "--timeouts.heartbeat-s", "0.5")
FAKE = ("--engine", "fake", "--engine.num-blocks", "96", "--engine.max-step-tokens", "128")
TORCH_MEMORY = 2 << 20
NUM_LOOKS = 60  # at what the processes hold, while requests come
NUM_LOOKS_AT_END = 3  # at rest, a heartbeat apart
DEADLINE_S = 120.0
# Processes that are never killed: their memory tells.
SPARED = ("r0", "p0", "d0")


@dataclass
class Done:
    """What the run counts."""

    asked: Counter[str] = field(default_factory=Counter)
    attempts: Counter[int] = field(default_factory=Counter)
    num_tokens: int = 0
    wrong: list[str] = field(default_factory=list)
    routers_killed: int = 0
    num_attacks: int = 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--engine", choices=("fake", "torch", "both"), default="both")
    parser.add_argument("--requests", type=int, default=10_000, help="in all (default 10000)")
    parser.add_argument("--minutes", type=float, default=30.0, help="over which they are spread (default 30)")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args(argv)
    engines = ("fake", "torch") if arguments.engine == "both" else (arguments.engine,)
    good = [
        asyncio.run(
            soak(
                engine,
                arguments.requests // len(engines),
                60 * arguments.minutes / len(engines),
                Random(arguments.seed),
            )
        )
        for engine in engines
    ]
    return 0 if all(good) else 1


async def soak(engine: str, num_requests: int, takes_s: float, random: Random) -> bool:
    """One engine's share."""
    with tempfile.TemporaryDirectory(prefix="pdserve-soak-") as name:
        folder = Path(name)
        flags = FAKE if engine == "fake" else torch_flags(folder)
        with Singles(folder, *FLAGS) as cluster:
            for index in range(2):
                cluster.router(f"r{index}")
            for index in range(NUM_PREFILL):
                cluster.worker("prefill", f"p{index}", *flags)
            for index in range(NUM_DECODE):
                cluster.worker("decode", f"d{index}", *flags)
            cluster.start()
            try:
                return await Run(engine, cluster, flags, num_requests, takes_s, random).run()
            except BaseException:
                print(cluster.log_tails(), file=sys.stderr)
                raise


def torch_flags(folder: Path) -> tuple[str, ...]:
    """A small random model with a real tokenizer and chat template, in deterministic mode."""
    from tests.soak.small_model import save_small_model

    model = save_small_model(folder / "model")
    return (
        *("--model", str(model), "--deterministic", "--engine.dtype", "float32"),
        *(
            "--engine.kv-memory-bytes",
            f"{TORCH_MEMORY}",
            "--engine.max-step-tokens",
            "128",
            "--engine.threads",
            "1",
        ),
    )


class Run:
    """One cluster's soak."""

    def __init__(
        self,
        engine: str,
        cluster: Singles,
        flags: tuple[str, ...],
        num_requests: int,
        takes_s: float,
        random: Random,
    ) -> None:
        self._engine = engine
        self._cluster = cluster
        self._flags = flags
        self._num_requests = num_requests
        self._each_s = takes_s / num_requests
        self._random = random
        self._done = Done()
        self._memory: dict[str, list[int]] = {name: [] for name in SPARED}
        self._memory_at_end: dict[str, list[int]] = {name: [] for name in SPARED}

    async def run(self) -> bool:
        """Ask, disturb, and look; whether all was right."""
        addresses = [router.address for router in self._cluster.routers]
        clients = [AsyncClient(addresses), AsyncClient(addresses[::-1])]
        workers = [worker.id for worker in self._cluster.workers]
        for client in clients:
            await at_rest(client, workers)
        model = await clients[0].model()
        pages = await write_book(
            clients[0], self._random, NUM_PAGES, model.vocab_size, chats=model.has_chat_template
        )
        print(f"{self._engine}: {len(pages)} answers written down undisturbed", flush=True)
        await self._attack_with_all()
        operator = OperatorClient([router.operators for router in self._cluster.routers])
        churn = Churn(self._cluster, operator, self._random, self._flags, spared=SPARED, stops=True)
        disturb = asyncio.create_task(self._disturb(churn))
        try:
            await self._ask_all(clients, pages, disturb)
        finally:
            self._over = True
        await disturb
        await operator.close()
        for client in clients:
            await at_rest(client, workers)
        await self._attack_with_all()
        for _ in range(NUM_LOOKS_AT_END):
            for client in clients:
                await at_rest(client, workers)
            self._weigh(self._memory_at_end)
        for client in clients:
            await client.close()
        return self._report(churn)

    _over = False

    async def _ask_all(
        self, clients: list[AsyncClient], pages: list[Page], disturb: asyncio.Task[None]
    ) -> None:
        room = asyncio.Semaphore(NUM_AT_ONCE)
        weigh_each = max(1, self._num_requests // NUM_LOOKS)

        async def one(index: int) -> None:
            try:
                await self._ask(clients[index % 2], pages[index % len(pages)], index)
            except AssertionError as error:
                self._done.wrong.append(str(error))
            except Exception as error:  # whatever ends a request here is a finding, and the run goes on
                self._done.wrong.append(f"{type(error).__name__}: {error}")
            finally:
                room.release()

        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        burst_ends = 0
        async with asyncio.TaskGroup() as group:
            for index in range(self._num_requests):
                if index >= burst_ends:  # they come in bursts, in the long run evenly
                    burst_ends = index + self._random.randint(1, 2 * NUM_AT_ONCE)
                    await asyncio.sleep(begun_s + burst_ends * self._each_s - loop.time())
                await room.acquire()
                if disturb.done():
                    disturb.result()
                if index % weigh_each == 0:
                    self._weigh(self._memory)
                    print(f"{self._engine}: {index} of {self._num_requests}", flush=True)
                group.create_task(one(index))

    async def _ask(self, client: AsyncClient, page: Page, index: int) -> None:
        """To its end, or the client leaves, or it hasn't much time."""
        kind = ("whole", "whole", "whole", "whole", "left", "hurried")[index % 6]
        self._done.asked[kind] += 1
        if kind == "left":
            await self._leave_midway(client, page)
            return
        deadline_s = 0.3 if kind == "hurried" else DEADLINE_S
        try:
            completion = await collect(client.generate(page.request, deadline_s=deadline_s))
        except (DeadlineExceeded, Overloaded):  # the latter: it would come too late
            if kind != "hurried":
                raise
            self._done.asked["too late"] += 1
            return
        page.check(completion)
        self._done.num_tokens += page.num_tokens
        self._done.attempts[completion.finished.num_attempts] += 1

    async def _leave_midway(self, client: AsyncClient, page: Page) -> None:
        enough = self._random.randint(1, 20)
        ids: dict[int, list[int]] = {}
        async with aclosing(client.generate(page.request, deadline_s=DEADLINE_S)) as events:
            async for event in events:
                if isinstance(event, Tokens):
                    ids.setdefault(event.choice, []).extend(event.token_ids)
                    if sum(map(len, ids.values())) >= enough:
                        break
        page.check_begins(ids)
        self._done.num_tokens += sum(map(len, ids.values()))

    async def _disturb(self, churn: Churn) -> None:
        """One thing after another until the requests are over."""
        while not self._over:
            await churn.go_on()
            await self._attack(self._random.choice(ATTACKS))
            if churn.done.total() % ROUTERS_DIE_EACH == 0:
                await self._kill_router(self._cluster.routers[1])

    async def _attack_with_all(self) -> None:
        for attack in ATTACKS:
            await self._attack(attack)

    async def _attack(self, attack: Attack) -> None:
        """One cheap request that would cost much; how it should end depends on the model, so only bugs count here."""
        send = attack.prepare()
        async with grpc.aio.insecure_channel(self._cluster.routers[0].address) as channel:
            codes = await asyncio.gather(*(send(channel) for _ in range(attack.at_once)))
        self._done.num_attacks += len(codes)
        if bugs := set(codes) & {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL}:
            self._done.wrong.append(f"attack {attack.name} ended {bugs}")

    async def _kill_router(self, router: Single) -> None:
        await asyncio.to_thread(router.kill)
        await router.start().ready()
        self._done.routers_killed += 1
        async with aclosing(_Asked(router.address)) as asked:
            await until("the router has its workers again", lambda: asked.knows(len(self._cluster.workers)))

    def _weigh(self, looks: dict[str, list[int]]) -> None:
        for name in SPARED:
            looks[name].append(Footprint.of(self._cluster.all[name].pid).rss_bytes)

    def _report(self, churn: Churn) -> bool:
        done = self._done
        grown = [name for name in SPARED if has_grown(self._memory[name], self._memory_at_end[name])]
        told = {
            "engine": self._engine,
            "machine": platform.processor() or platform.machine(),
            "requests": done.asked.total() - done.asked["too late"],
            "kinds": dict(done.asked),
            "tokens_checked": done.num_tokens,
            "attempts": dict(sorted(done.attempts.items())),
            "disturbances": dict(churn.done),
            "routers_killed": done.routers_killed,
            "attacks": done.num_attacks,
            "memory_mib": _mib(self._memory),
            "memory_at_end_mib": _mib(self._memory_at_end),
            "grown": grown,
            "wrong": len(done.wrong),
        }
        print(json.dumps(told), flush=True)
        for each in done.wrong[:20]:
            print(each, file=sys.stderr)
        return not done.wrong and not grown


def _mib(looks: dict[str, list[int]]) -> dict[str, list[int]]:
    return {name: [size >> 20 for size in sizes] for name, sizes in looks.items()}


class _Asked:
    """A client of one router alone."""

    def __init__(self, address: str) -> None:
        self._client = AsyncClient([address])

    async def knows(self, num_workers: int) -> bool:
        status = await status_of(self._client)
        return status is not None and len(status.workers) == num_workers

    async def aclose(self) -> None:
        await self._client.close()


if __name__ == "__main__":
    sys.exit(main())
