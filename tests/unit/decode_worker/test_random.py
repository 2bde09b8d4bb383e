"""Random orders of events at a decode worker: one verdict a grant, right texts, no block leaks."""

from __future__ import annotations

import random

import pytest

from kv_transfer.messages import ExpectLease, LeaseReleased
from pdserve.errors import KvCorrupt, WorkerLost
from pdserve.messages import (
    Abort,
    DecodeStarted,
    Failed,
    Granted,
    Refused,
    SequenceFinished,
)
from pdserve.worker.messages import BeginDrain, Drained, FromSession, SessionOpened, ToSession
from tests.unit.decode_worker.bench import DecodeBench, prompt


class Walk:
    """One random history. Plays routers and the transfer owner, late and early, in every order that they may."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.bench = DecodeBench(
            num_blocks=self.random.choice([5, 12, 30]),
            max_waiting=self.random.choice([0, 3]),
            max_batch=self.random.choice([2, 8]),
            recompute_max_tokens=self.random.choice([32, 2048]),
        )
        self.bench.core.handle(SessionOpened(2, "r2"))
        self.session_of: dict[int, int] = {}
        self.aborted: dict[int, None] = {}
        self.open: dict[int, None] = {}  # handles of leases that the transfer owner has
        self.quarantined: list[int] = []
        self.num_seen = 0

    def run(self, num_events: int) -> None:
        acts = [self.start] * 4 + [self.turn] * 10 + [self.hand_off, self.hand_off]
        acts += [self.retire, self.abort, self.time, self.release]
        if self.random.random() < 0.3:
            acts.append(self.session)
        for _ in range(num_events):
            self.random.choice(acts)()
            self.look()
        self.settle()

    def start(self) -> None:
        handle = len(self.session_of) + 1
        window = self.bench.num_blocks * 16
        max_tokens = self.random.choice([1, 2, 20, 40])
        length = min(self.random.choice([1, 16, 31, 32, 60, window // 2]), window - max_tokens)
        self.session_of[handle] = self.random.choice([1, 2])
        self.bench.start(
            handle,
            prompt(length, self.random.randrange(4)),
            session_id=self.session_of[handle],
            local=self.random.random() < 0.3,
            max_tokens=max_tokens,
            priority=self.random.randrange(2),
            age_s=self.random.choice([0.0, 2.0]),
            deadline_s=self.random.choice([0.5, 60.0]),
        )

    def turn(self) -> None:
        self.bench.turn()

    def pick(self) -> int | None:
        return self.random.choice(list(self.open)) if self.open else None

    def hand_off(self) -> None:
        """All arrives and is confirmed; P does so also for a lease that this worker is just ending."""
        handle = self.pick()
        if handle is None:
            return
        if self.bench.keys[handle].max_tokens == 1:
            self.first_was_last(handle)
        elif self.bench.lease(handle) in self.bench.ended_leases():
            self.bench.confirm(handle)
        else:
            self.bench.hand_off(handle)
        self.over(handle)

    def first_was_last(self, handle: int) -> None:
        """P has said so; the router lets go of the lease."""
        assert not self.bench.expect(handle).block_ids
        self.aborted[handle] = None
        self.bench.core.handle(FromSession(self.session_of[handle], Abort(handle)))
        self.bench.retire(handle)

    def retire(self) -> None:
        handle = self.pick()
        if handle is None:
            return
        quarantine = self.random.random() < 0.3
        error = self.random.choice([WorkerLost("link"), KvCorrupt("checksum")])
        self.bench.retire(handle, error, quarantine=quarantine)
        if quarantine:
            self.quarantined.append(handle)
        self.over(handle)

    def release(self) -> None:
        while self.quarantined:
            self.bench.core.handle(LeaseReleased(self.bench.lease(self.quarantined.pop())))

    def over(self, handle: int) -> None:
        del self.open[handle]

    def abort(self) -> None:
        handle = self.random.randrange(len(self.session_of) + 2)
        self.aborted[handle] = None
        self.bench.core.handle(FromSession(self.random.choice([1, 2]), Abort(handle)))

    def time(self) -> None:
        self.bench.clock.advance(self.random.choice([0.01, 0.3, 1.0]))

    def session(self) -> None:
        self.bench.close_session(2)
        self.aborted.update({handle: None for handle, session in self.session_of.items() if session == 2})
        for handle in range(len(self.session_of) + 1, 400):
            self.aborted[handle] = None  # what still comes through that session is never heard

    def look(self) -> None:
        """After each event: the books are right."""
        by_lease = {granted.lease_id: granted.handle for granted in self.bench.granted()}
        for message in self.bench.to_transfer[self.num_seen :]:
            if isinstance(message, ExpectLease):
                self.open[by_lease[message.lease_id]] = None
        self.num_seen = len(self.bench.to_transfer)
        counts = self.bench.engine.pool.counts()
        total = counts.free + counts.granted + counts.owned + counts.cached + counts.quarantined
        assert total == self.bench.num_blocks
        assert self.bench.engine.pool.adds_up()

    def settle(self) -> None:
        """Everything ends; then everything must be over."""
        for _ in range(400):
            self.bench.run()
            self.look()
            self.release()
            ended = self.bench.ended_leases()
            for handle in list(self.open):
                if self.bench.lease(handle) in ended:
                    self.bench.retire(handle)
                elif self.bench.keys[handle].max_tokens == 1:
                    self.first_was_last(handle)
                else:
                    self.bench.hand_off(handle)
                self.over(handle)
            self.bench.clock.advance(0.2)
        self.bench.core.handle(BeginDrain(1.0))
        self.bench.turn()
        assert Drained() in self.bench.to_loop, "somebody waits for ever"
        self.bench.assert_at_rest()
        for handle in self.session_of:
            self.assert_answers(handle)

    def assert_answers(self, handle: int) -> None:
        kinds: list[type] = []
        for message in self.bench.to_loop:
            if not isinstance(message, ToSession):
                continue
            up = message.message
            if (
                isinstance(up, Granted | DecodeStarted | SequenceFinished | Failed | Refused)
                and up.handle == handle
            ):
                kinds.append(type(up))
        session_id = self.session_of[handle]
        tokens = self.bench.tokens(handle, session_id)
        assert tokens == self.bench.expected(handle)[: len(tokens)], f"wrong text of {handle}"
        if kinds and kinds[-1] is SequenceFinished:
            assert tokens == self.bench.expected(handle)
        if handle in self.aborted:
            return
        assert kinds in (
            [Granted, DecodeStarted, SequenceFinished],
            [Granted, DecodeStarted, Failed],
            [Granted, Failed],
            [Failed],
            [Refused],
        ), (handle, kinds)


@pytest.mark.parametrize("seed", range(12))
def test_one_verdict_a_grant_right_texts_and_no_leak(seed: int) -> None:
    Walk(seed).run(200)
