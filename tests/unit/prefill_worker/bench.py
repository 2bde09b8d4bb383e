"""A prefill core over the fake engine and a virtual clock; what it says lands in plain lists."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from kv_transfer.messages import CommitLease, LeaseClosed, Offer, OpenLease, WithdrawLease
from pdserve.engine.engine import Engine
from pdserve.engine.fake_runner import FakeFaults, FakeRunner
from pdserve.engine.scheduler import EngineLimits
from pdserve.errors import PdserveError
from pdserve.ids import NAMELESS, AttemptName, Epoch, WorkerRef
from pdserve.messages import Failed, Refused, StartPrefill, Up
from pdserve.sampling import SampleKey, SamplingParams
from pdserve.service.config import Config, WorkerConfig
from pdserve.tracing import Tracer, TraceSpan
from pdserve.worker.messages import (
    FromSession,
    LinkChanged,
    SessionClosed,
    SessionOpened,
    StepBegun,
    ToSession,
)
from pdserve.worker.metered_runner import MeteredRunner
from pdserve.worker.role import CoreParts
from prefill_worker.core import PrefillCore
from tests.support.virtual_clock import VirtualClock

D1 = WorkerRef("d1", Epoch(1, 1))
D2 = WorkerRef("d2", Epoch(1, 2))
BLOCK = 16


def key(max_tokens: int = 8, *, ignore_eos: bool = True) -> SampleKey:
    return SampleKey(
        params=SamplingParams(temperature=0.0, ignore_eos=ignore_eos),
        seed=7,
        choice=0,
        eos_token_ids=(0,),
        max_tokens=max_tokens,
    )


def failure(message: object) -> str:
    """The class of the error that ended, or refused, an attempt."""
    assert isinstance(message, Failed | Refused)
    return message.failure.error


@dataclass
class PrefillBench:
    """Feeds messages, takes turns, sorts what comes out."""

    num_blocks: int = 64
    queue_tokens: int = 1024
    chunk_tokens: int = 64
    faults: FakeFaults | None = None
    links: tuple[WorkerRef, ...] = (D1, D2)
    clock: VirtualClock = field(default_factory=VirtualClock)
    to_transfer: list[object] = field(default_factory=list)
    to_loop: list[object] = field(default_factory=list)
    spans: list[TraceSpan] = field(default_factory=list)

    def __post_init__(self) -> None:
        runner = FakeRunner(num_blocks=self.num_blocks, block_size=BLOCK, faults=self.faults)
        meter = MeteredRunner(runner, self.clock, lambda new: self.to_loop.append(StepBegun(new)))
        limits = EngineLimits(max_step_tokens=self.chunk_tokens, max_batch=8, chunk_tokens=self.chunk_tokens)
        self.engine = Engine(meter, limits, self.clock)
        self.core = PrefillCore(
            CoreParts(
                engine=self.engine,
                meter=meter,
                to_transfer=self.to_transfer.append,
                to_loop=self.to_loop.append,
                clock=self.clock,
                random=random.Random(1),
                config=Config(worker=WorkerConfig(queue_tokens=self.queue_tokens)),
                tracer=Tracer(self.spans.extend, random.Random(2), 0.0),
            )
        )
        self.core.handle(SessionOpened(1, "r1"))
        for worker in self.links:
            self.core.handle(LinkChanged(worker, True))

    def start(
        self,
        handle: int,
        ids: tuple[int, ...] | int = 40,
        *,
        session_id: int = 1,
        to: WorkerRef = D1,
        skip: int = 0,
        strikes: int = 0,
        deadline_s: float = 60.0,
        max_tokens: int = 8,
        num_prompt: int | None = None,
        name: AttemptName = NAMELESS,
    ) -> None:
        """One StartPrefill; the lease id is 1000 + handle. ids as a number: a prompt of its own of that length."""
        token_ids = ids if isinstance(ids, tuple) else prompt(ids, handle)
        message = StartPrefill(
            handle=handle,
            token_ids=token_ids,
            num_prompt_tokens=num_prompt if num_prompt is not None else len(token_ids),
            key=key(max_tokens),
            deadline_left_s=deadline_s,
            num_strikes=strikes,
            lease_id=1000 + handle,
            decode_worker=to,
            num_skip_blocks=skip,
            name=name,
        )
        self.core.handle(FromSession(session_id, message))

    def turn(self) -> float | None:
        return self.core.step()

    def run(self) -> None:
        """Turns until the engine has nothing to do."""
        while self.core.step() == 0.0:
            pass

    def close(self, handle: int, error: PdserveError | None = None, *, link_lost: bool = False) -> None:
        self.core.handle(LeaseClosed(1000 + handle, error, 0, link_lost))
        self.turn()

    def said(self, kind: type[Up], session_id: int = 1) -> list[Up]:
        """Messages of one kind to one session, so far."""
        return [
            message.message
            for message in self.to_loop
            if isinstance(message, ToSession)
            and message.session_id == session_id
            and isinstance(message.message, kind)
        ]

    def offers(self, handle: int) -> list[Offer]:
        return [m for m in self.to_transfer if isinstance(m, Offer) and m.lease_id == 1000 + handle]

    def leases(self, kind: type[OpenLease | CommitLease | WithdrawLease]) -> list[int]:
        """Handles whose leases were opened, committed or withdrawn, in order."""
        return [m.lease_id - 1000 for m in self.to_transfer if isinstance(m, kind)]

    def assert_at_rest(self) -> None:
        """Nothing is left behind, whatever happened."""
        counts = self.engine.pool.counts()
        assert counts.free + counts.cached == self.num_blocks
        assert (counts.granted, counts.owned, counts.quarantined) == (0, 0, 0)
        assert not self.engine.has_work

    def close_session(self, session_id: int = 1) -> None:
        self.core.handle(SessionClosed(session_id))


def prompt(num_tokens: int, salt: int) -> tuple[int, ...]:
    """A prompt that shares no block with one of another salt."""
    return tuple(1 + (salt * 31 + index * 7) % 200 for index in range(num_tokens))
