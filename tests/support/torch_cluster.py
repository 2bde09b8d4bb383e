"""A whole cluster of real models in one process under virtual time, which writes down every bit that it sampled from.

    async def talk(cluster: TorchCluster) -> list[Answer]: ...
    record = play(shelf, shape, talk)

Computing takes no virtual time, and delays are drawn, so the same shape and talk always give the same batches.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog
import xxhash
from torch import Tensor

from pdserve.engine.numerics import Precision
from pdserve.engine.port import Row
from pdserve.engine.torch_runner import TorchRunner
from pdserve.messages import Role
from pdserve.request import Finished, GenerateRequest, Input, Started, Tokens
from pdserve.sampling import SamplingParams
from pdserve.service.config import Config
from pdserve.tokenizer import Tokenizer
from tests.simulation.cluster import Delays, MakeRunner, SimCluster, SimWorker
from tests.support.virtual_clock import VirtualClock
from tests.support.virtual_loop import run_virtual

BLOCK_SIZE = 16
_LIMIT_S = 3600.0
_JOIN_S = 2.0
_QUIET_S = 6.0  # blocks that were held for a while (hold_s) are free by then
# Steps take longer than transfers, so that requests meet in a batch.
_SLOWNESS = {Role.PREFILL: 1.0, Role.DECODE: 30.0, Role.BOTH: 4.0}


class RecordingRunner(TorchRunner):
    """A TorchRunner that keeps a digest of the logits of each row that samples, by the ids before it.

    kept  the logits themselves, by the same ids, if they are wanted
    """

    kept: dict[tuple[int, ...], Tensor] | None = None

    def begin_record(self) -> None:
        """Forget what was recorded; before the first step."""
        self.bits: dict[int, int] = {}
        self.num_conflicts = 0
        self.largest_batch = 0
        self.longest_row = 0

    def logits(self, rows: Sequence[Row]) -> Tensor:
        given = super().logits(rows)
        asked = [row.sample for row in rows if row.sample is not None]
        for row, spec in zip(given, asked, strict=True):
            bits = xxhash.xxh3_64_intdigest(row.contiguous().numpy())
            self.num_conflicts += self.bits.setdefault(_digest(spec.ids), bits) != bits
            if self.kept is not None:
                self.kept[tuple(spec.ids)] = row.clone()
        self.largest_batch = max(self.largest_batch, sum(1 for row in rows if len(row.token_ids) == 1))
        self.longest_row = max(self.longest_row, *(len(row.token_ids) for row in rows))
        return given


def _digest(ids: Sequence[int]) -> int:
    return xxhash.xxh3_64_intdigest(b"".join(token.to_bytes(4, "little") for token in ids))


class Shelf:
    """Loaded runners, lent to one cluster after another: a load takes longer than most tests.

    A worker finds its predecessor's bytes in the pool, which must not matter.

    keep_in  gets the logits of all samples, by the ids before them
    """

    def __init__(
        self,
        folder: Path,
        tokenizer: Tokenizer,
        *,
        dtype: str,
        deterministic: bool = True,
        num_threads: int = 1,
        precision: Precision | None = None,
        keep_in: dict[tuple[int, ...], Tensor] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._folder = folder
        self._dtype = dtype
        self._deterministic = deterministic
        self._num_threads = num_threads
        self._precision = precision
        self._keep_in = keep_in
        self._runners: dict[tuple[int, int], RecordingRunner] = {}

    def runner(self, index: int, num_blocks: int) -> RecordingRunner:
        """The index-th runner with such a pool."""
        key = (index, num_blocks)
        if key not in self._runners:
            self._runners[key] = RecordingRunner(
                self._folder,
                dtype=self._dtype,
                deterministic=self._deterministic,
                num_threads=self._num_threads,
                num_blocks=num_blocks,
                kv_memory_bytes=0,
                block_size=BLOCK_SIZE,
                precision=self._precision,
            )
            self._runners[key].kept = self._keep_in
        return self._runners[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A cluster. small_pools: num_blocks of single workers instead."""

    config: Config
    workers: tuple[tuple[str, Role], ...]
    num_blocks: int
    small_pools: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request."""

    prompt: Input
    sampling: SamplingParams
    seed: int


@dataclass(slots=True)
class Answer:
    """What its client got."""

    prompt_ids: tuple[int, ...] = ()
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    num_cached: int = 0
    num_attempts: int = 0
    prefill_worker: str = ""
    decode_worker: str = ""

    @property
    def ids(self) -> tuple[int, ...]:
        return (*self.prompt_ids, *self.token_ids)


@dataclass(slots=True)
class Record:
    """What clients got and what the workers did while a shape was played.

    bits             digest of the logits that each sample came from, by the digest of the ids before it
    num_conflicts    samples that were computed twice, with other bits
    largest_batch    by worker: single-token rows in a step; longest_row: tokens
    received_blocks  by all workers, over links
    num_events       of the workers, as they log them: "sequence.preempted", …
    """

    answers: list[Answer] = field(default_factory=list)
    bits: dict[int, int] = field(default_factory=dict)
    num_conflicts: int = 0
    largest_batch: dict[str, int] = field(default_factory=dict)
    longest_row: dict[str, int] = field(default_factory=dict)
    received_blocks: int = 0
    num_events: dict[str, int] = field(default_factory=dict)

    @property
    def tokens(self) -> list[list[int]]:
        """Of all answers."""
        return [answer.token_ids for answer in self.answers]

    def add(self, worker_id: str, runner: RecordingRunner) -> None:
        """Take in what one worker did."""
        self.num_conflicts += runner.num_conflicts
        for key, bits in runner.bits.items():
            self.num_conflicts += self.bits.setdefault(key, bits) != bits
        self.largest_batch[worker_id] = runner.largest_batch
        self.longest_row[worker_id] = runner.longest_row

    def on_log(self, _logger: Any, _name: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
        """A structlog processor that counts."""
        name = str(event["event"])
        self.num_events[name] = self.num_events.get(name, 0) + 1
        raise structlog.DropEvent


class TorchCluster:
    """One router and some workers, up and paired.

    on_tokens  may be set: told of each arrival of tokens at a client, with their number
    """

    def __init__(self, sim: SimCluster) -> None:
        self.sim = sim
        self.on_tokens: Callable[[int], None] = lambda num_tokens: None

    @property
    def workers(self) -> dict[str, SimWorker]:
        return self.sim.workers

    async def ask(self, job: Job) -> Answer:
        """Send one request and read it to its end."""
        app = self.sim.routers["r0"].app
        assert app is not None, "the router runs"
        answer = Answer()
        async for event in app.generate(
            GenerateRequest(input=job.prompt, sampling=job.sampling, seed=job.seed), deadline_left_s=None
        ):
            if isinstance(event, Started):
                answer.prompt_ids = event.prompt_token_ids
            elif isinstance(event, Tokens):
                assert event.first_index == len(answer.token_ids)
                answer.token_ids.extend(event.token_ids)
                answer.text += event.text
                self.on_tokens(len(event.token_ids))
            elif isinstance(event, Finished):
                answer.num_cached = event.usage.num_cached_tokens
                answer.num_attempts = event.num_attempts
                answer.prefill_worker, answer.decode_worker = event.prefill_worker, event.decode_worker
        return answer

    async def ask_all(self, jobs: Sequence[Job], at_once: int) -> list[Answer]:
        """Several requests, so many at a time; answers in the order of `jobs`."""
        gate = asyncio.Semaphore(at_once)

        async def one(job: Job) -> Answer:
            async with gate:
                return await self.ask(job)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(job)) for job in jobs]
        return [task.result() for task in tasks]


def play(shelf: Shelf, shape: Shape, talk: Callable[[TorchCluster], Awaitable[list[Answer]]]) -> Record:
    """Bring a cluster up, talk to it, and check that it is left without a block in use."""
    record = Record()
    lent: dict[str, RecordingRunner] = {}

    def make_runner(worker_id: str, num_blocks: int, block_size: int) -> RecordingRunner:
        assert block_size == BLOCK_SIZE
        if worker_id not in lent:
            lent[worker_id] = shelf.runner(len(lent), num_blocks)
            lent[worker_id].begin_record()
        return lent[worker_id]

    structlog.configure(
        processors=[record.on_log],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        cache_logger_on_first_use=False,
    )
    clock = VirtualClock()
    try:
        run_virtual(_play(shelf, shape, make_runner, talk, clock, record), clock, limit_s=_LIMIT_S)
    finally:
        structlog.reset_defaults()
    for worker_id, runner in lent.items():
        record.add(worker_id, runner)
    return record


async def _play(
    shelf: Shelf,
    shape: Shape,
    make_runner: MakeRunner,
    talk: Callable[[TorchCluster], Awaitable[list[Answer]]],
    clock: VirtualClock,
    record: Record,
) -> None:
    sim = SimCluster(
        shape.config,
        clock,
        "torch",
        num_blocks=shape.num_blocks,
        block_size=BLOCK_SIZE,
        delays=Delays(session_s=0.001, link_s=0.001, owner_s=0.002),
        make_runner=make_runner,
        tokenizer=shelf.tokenizer,
    )
    async with sim:
        for worker_id, role in shape.workers:
            worker = sim.add_worker(worker_id, role, num_blocks=shape.small_pools.get(worker_id))
            worker.engine_slowness = _SLOWNESS[role]
        await asyncio.sleep(_JOIN_S)
        record.answers = await talk(TorchCluster(sim))
        await asyncio.sleep(_QUIET_S)
        for worker in sim.workers.values():
            record.received_blocks += _received_blocks(worker)
            _check_rest(worker)


def _received_blocks(worker: SimWorker) -> int:
    run = None if worker.worker is None else worker.worker.current
    if run is None:
        return 0
    return run.transfer.metrics.received_bytes // run.engine.runner.layout.block_bytes


def _check_rest(worker: SimWorker) -> None:
    counts = worker.counts()
    assert counts is not None, f"{worker.id} is not running, exit codes {worker.exit_codes}"
    in_use = counts.granted + counts.owned + counts.quarantined
    assert in_use == 0, f"{worker.id}: blocks in use at rest: {counts}"
