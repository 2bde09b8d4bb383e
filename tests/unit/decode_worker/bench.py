"""A decode core over the fake engine and a virtual clock; what it says lands in plain lists.

`hand_off` plays the transfer owner: it writes a prompt's KV into the granted blocks as another fake engine computed
it, so every token that follows proves that the right blocks were used.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from decode_worker.core import DecodeCore
from kv_transfer.messages import EndLease, ExpectLease, HandedOff, PullProgress, Retired
from pdserve.engine import fake_rule
from pdserve.engine.engine import Engine
from pdserve.engine.fake_runner import FakeFaults, FakeRunner
from pdserve.engine.port import Row
from pdserve.engine.scheduler import EngineLimits
from pdserve.errors import PdserveError, WorkerLost
from pdserve.ids import NAMELESS, AttemptName, Epoch, WorkerRef
from pdserve.messages import (
    DecodeStarted,
    Failed,
    Granted,
    Refused,
    StartDecode,
    Step,
    Up,
)
from pdserve.sampling import SampleKey, SamplingParams
from pdserve.service.config import Config, WorkerConfig
from pdserve.tracing import Tracer, TraceSpan
from pdserve.worker.messages import FromSession, SessionClosed, SessionOpened, StepBegun, ToSession
from pdserve.worker.metered_runner import MeteredRunner
from pdserve.worker.role import CoreParts
from tests.support.memories import pool_bytes
from tests.support.virtual_clock import VirtualClock

P1 = WorkerRef("p1", Epoch(1, 1))
BLOCK = 16


def key(max_tokens: int = 8) -> SampleKey:
    return SampleKey(
        params=SamplingParams(temperature=0.0), seed=7, choice=0, eos_token_ids=(256,), max_tokens=max_tokens
    )


def failure(message: object) -> str:
    """The class of the error that ended, or refused, an attempt."""
    assert isinstance(message, Failed | Refused)
    return message.failure.error


@dataclass
class DecodeBench:
    """Feeds messages, takes turns, sorts what comes out."""

    num_blocks: int = 64
    max_waiting: int = 4
    max_batch: int = 8
    decode_prefill_tokens: int | None = 16
    recompute_max_tokens: int = 2048
    faults: FakeFaults | None = None
    clock: VirtualClock = field(default_factory=VirtualClock)
    to_transfer: list[object] = field(default_factory=list)
    to_loop: list[object] = field(default_factory=list)
    spans: list[TraceSpan] = field(default_factory=list)
    prompts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    keys: dict[int, SampleKey] = field(default_factory=dict)
    num_prompt: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.runner = FakeRunner(num_blocks=self.num_blocks, block_size=BLOCK, faults=self.faults)
        meter = MeteredRunner(self.runner, self.clock, lambda new: self.to_loop.append(StepBegun(new)))
        limits = EngineLimits(
            max_step_tokens=64,
            max_batch=self.max_batch,
            chunk_tokens=64,
            decode_prefill_tokens=self.decode_prefill_tokens,
            recompute_max_tokens=self.recompute_max_tokens,
        )
        self.engine = Engine(meter, limits, self.clock)
        self.core = DecodeCore(
            CoreParts(
                engine=self.engine,
                meter=meter,
                to_transfer=self.to_transfer.append,
                to_loop=self.to_loop.append,
                clock=self.clock,
                random=random.Random(1),
                config=Config(worker=WorkerConfig(max_waiting=self.max_waiting)),
                tracer=Tracer(self.spans.extend, random.Random(2), 0.0),
            )
        )
        self.core.handle(SessionOpened(1, "r1"))

    # --- the router's part

    def start(
        self,
        handle: int,
        ids: tuple[int, ...] | int = 40,
        *,
        session_id: int = 1,
        local: bool = False,
        strikes: int = 0,
        deadline_s: float = 60.0,
        max_tokens: int = 8,
        num_prompt: int | None = None,
        priority: int = 0,
        age_s: float = 0.0,
        name: AttemptName = NAMELESS,
    ) -> None:
        """One StartDecode. ids as a number: a prompt of its own of that length."""
        token_ids = ids if isinstance(ids, tuple) else prompt(ids, handle)
        self.prompts[handle], self.keys[handle] = token_ids, key(max_tokens)
        self.num_prompt[handle] = num_prompt if num_prompt is not None else len(token_ids)
        message = StartDecode(
            handle=handle,
            token_ids=token_ids,
            num_prompt_tokens=self.num_prompt[handle],
            key=key(max_tokens),
            deadline_left_s=deadline_s,
            num_strikes=strikes,
            source=None if local else P1,
            priority=priority,
            age_s=age_s,
            name=name,
        )
        self.core.handle(FromSession(session_id, message))

    def close_session(self, session_id: int = 1) -> None:
        self.core.handle(SessionClosed(session_id))

    # --- the transfer owner's part

    def lease(self, handle: int) -> int:
        """The lease id of a grant."""
        return next(m.lease_id for m in self.granted() if m.handle == handle)

    def expect(self, handle: int) -> ExpectLease:
        """What the transfer owner was told of a grant."""
        lease_id = self.lease(handle)
        return next(m for m in self.to_transfer if isinstance(m, ExpectLease) and m.lease_id == lease_id)

    def pulled(self, handle: int, num_received: int) -> None:
        self.core.handle(PullProgress(self.lease(handle), num_received))

    def hand_off(self, handle: int) -> None:
        """All of a transfer: bytes, progress, CONFIRM."""
        expect = self.expect(handle)
        if expect.block_ids:
            source = _prefilled(self.prompts[handle])
            size = self.runner.layout.block_bytes
            for index, block_id in enumerate(expect.block_ids, start=expect.num_skip):
                piece = source[index * size : (index + 1) * size]
                pool_bytes(self.runner)[block_id * size : (block_id + 1) * size] = piece
            self.pulled(handle, len(expect.block_ids))
        self.confirm(handle)

    def confirm(self, handle: int, first_token: int | None = None) -> None:
        if first_token is None:
            first_token = self.expected(handle)[0]
        self.core.handle(
            HandedOff(
                lease_id=self.lease(handle),
                first_token=first_token,
                logprobs=None,
                received_bytes=4096,
                transport="stream",
                transfer_s=0.2,
                transfer_exposed_s=0.1,
                commit_s=0.01,
            )
        )

    def retire(self, handle: int, error: PdserveError | None = None, *, quarantine: bool = False) -> None:
        error = error or WorkerLost("the link has ended")
        self.core.handle(Retired(self.lease(handle), error, quarantine))

    def ended_leases(self) -> list[int]:
        return [message.lease_id for message in self.to_transfer if isinstance(message, EndLease)]

    # --- turns and answers

    def turn(self) -> float | None:
        return self.core.step()

    def run(self) -> None:
        """Turns until the engine has nothing to do."""
        while self.core.step() == 0.0:
            pass

    def said(self, kind: type[Up], session_id: int = 1) -> list[Up]:
        return [
            message.message
            for message in self.to_loop
            if isinstance(message, ToSession)
            and message.session_id == session_id
            and isinstance(message.message, kind)
        ]

    def granted(self) -> list[Granted]:
        return [
            message.message
            for message in self.to_loop
            if isinstance(message, ToSession) and isinstance(message.message, Granted)
        ]

    def expected(self, handle: int) -> list[int]:
        """What the fake model's rule says for a handle."""
        return fake_rule.expected_choice(
            self.prompts[handle], self.keys[handle], num_prompt_tokens=self.num_prompt[handle]
        )

    def tokens(self, handle: int, session_id: int = 1) -> list[int]:
        """All tokens a router got for a handle, DecodeStarted's first; checks that positions leave no gap."""
        tokens: list[int] = []
        for message in self.said(DecodeStarted, session_id) + self.said(Step, session_id):
            if isinstance(message, DecodeStarted) and message.handle == handle:
                tokens.append(message.first_token)
            elif isinstance(message, Step):
                for part in message.sequences:
                    if part.handle == handle:
                        assert part.first_position == len(self.prompts[handle]) + len(tokens)
                        tokens += part.token_ids
        return tokens

    def assert_at_rest(self) -> None:
        """Nothing is left behind, whatever happened."""
        counts = self.engine.pool.counts()
        assert counts.free + counts.cached == self.num_blocks, counts
        assert (counts.granted, counts.owned, counts.quarantined) == (0, 0, 0)
        assert not self.engine.sequences


def prompt(num_tokens: int, salt: int) -> tuple[int, ...]:
    """A prompt that shares no block with one of another salt."""
    return tuple(1 + (salt * 31 + index * 7) % 200 for index in range(num_tokens))


def _prefilled(ids: tuple[int, ...]) -> bytes:
    """The KV of a prompt as the prefill worker's pool has it, block by block."""
    num_blocks = -(-len(ids) // BLOCK)
    runner = FakeRunner(num_blocks=num_blocks, block_size=BLOCK)
    runner.run([Row(ids, 0, range(num_blocks), None)])
    return bytes(pool_bytes(runner))


def failures(bench: DecodeBench, session_id: int = 1) -> list[tuple[int, str]]:
    """(handle, class of the error) of all that have failed."""
    return [(m.handle, failure(m)) for m in bench.said(Failed, session_id) if isinstance(m, Failed)]
