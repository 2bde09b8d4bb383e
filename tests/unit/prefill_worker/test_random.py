"""Random orders of events at a prefill worker: whatever comes, each attempt is answered once and no block leaks."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.messages import CommitLease, OpenLease, WithdrawLease
from pdserve.engine import fake_rule
from pdserve.errors import Stale, WorkerLost
from pdserve.messages import (
    Abort,
    Demand,
    Failed,
    FirstToken,
    Refused,
)
from pdserve.worker.messages import BeginDrain, Drained, FromSession, LinkChanged, SessionOpened, ToSession
from prefill_worker.credits import CreditBook
from tests.unit.prefill_worker.bench import D1, D2, PrefillBench, key, prompt


class Walk:
    """One random history. Plays routers and the transfer owner; remembers what each attempt was told."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.bench = PrefillBench(
            num_blocks=self.random.choice([4, 9, 24]),
            queue_tokens=self.random.choice([64, 400]),
            chunk_tokens=self.random.choice([16, 64]),
        )
        self.bench.core.handle(SessionOpened(2, "r2"))
        self.sessions = {1, 2}
        self.prompts: dict[int, tuple[int, ...]] = {}
        self.aborted: dict[int, None] = {}
        self.open: dict[int, None] = {}
        self.num_seen = 0

    def run(self, num_events: int) -> None:
        acts = [self.start] * 4 + [self.turn] * 8 + [self.abort, self.close, self.close, self.time]
        acts += [self.demand, self.link] + ([self.session] if self.random.random() < 0.3 else [])
        for _ in range(num_events):
            self.random.choice(acts)()
            self.look()
        self.settle()

    def start(self) -> None:
        handle = len(self.prompts) + 1
        window = self.bench.num_blocks * 16
        length = self.random.choice([1, 15, 16, 17, 40, window // 2, window])
        self.prompts[handle] = prompt(min(length, window), self.random.randrange(4))
        self.bench.start(
            handle,
            self.prompts[handle],
            session_id=self.random.choice(sorted(self.sessions)),
            to=self.random.choice([D1, D2]),
            skip=self.random.randrange(len(self.prompts[handle]) // 16 + 1),
            deadline_s=self.random.choice([0.2, 30.0]),
            max_tokens=self.random.choice([1, 5]),
        )

    def turn(self) -> None:
        self.bench.turn()

    def abort(self) -> None:
        handle = self.random.randrange(len(self.prompts) + 2)
        session_id = self.random.choice([1, 2])
        self.aborted[handle] = None
        self.bench.core.handle(FromSession(session_id, Abort(handle)))

    def close(self) -> None:
        """The transfer owner ends a lease: confirmed if it was committed, else lost."""
        if not self.open:
            return
        handle = self.random.choice(list(self.open))
        self.close_one(handle, self.random.random() < 0.5)

    def close_one(self, handle: int, lost: bool) -> None:
        committed = handle in self.bench.leases(CommitLease) and handle not in self.bench.leases(
            WithdrawLease
        )
        if committed and not lost:
            self.bench.close(handle)
        else:
            error = self.random.choice([WorkerLost("link"), Stale("lease")])
            self.bench.close(handle, error, link_lost=isinstance(error, WorkerLost))
        del self.open[handle]

    def time(self) -> None:
        self.bench.clock.advance(self.random.choice([0.01, 0.3, 1.0]))

    def demand(self) -> None:
        message = Demand(self.random.choice([0, 100, 5000]))
        self.bench.core.handle(FromSession(self.random.choice([1, 2]), message))

    def link(self) -> None:
        up = self.random.random() < 0.8
        self.bench.core.handle(LinkChanged(self.random.choice([D1, D2]), up))

    def session(self) -> None:
        if len(self.sessions) == 2:
            self.bench.close_session(2)
            self.sessions = {1}
            for handle in self.prompts:
                self.aborted.setdefault(handle, None)

    def look(self) -> None:
        """After each event: the books are right."""
        for message in self.bench.to_transfer[self.num_seen :]:
            if isinstance(message, OpenLease):
                self.open[message.lease_id - 1000] = None
        self.num_seen = len(self.bench.to_transfer)
        counts = self.bench.engine.pool.counts()
        assert sum((counts.free, counts.owned, counts.cached)) == self.bench.num_blocks
        assert self.bench.engine.pool.adds_up()

    def settle(self) -> None:
        """Everything ends; then everything must be over."""
        self.bench.core.handle(BeginDrain(30.0))
        for _ in range(300):
            self.bench.turn()
            self.look()
            for handle in list(self.open):
                if handle in self.bench.leases(CommitLease) or handle in self.bench.leases(WithdrawLease):
                    self.close_one(handle, lost=False)
                elif handle in self.finals():
                    self.close_one(handle, lost=True)
            if not self.open:
                break
            self.bench.clock.advance(0.5)
        self.bench.turn()
        assert not self.open and Drained() in self.bench.to_loop
        self.bench.assert_at_rest()
        self.assert_answers()

    def finals(self) -> list[int]:
        return [
            handle
            for handle, answers in self.answers().items()
            if any(isinstance(a, FirstToken) and a.final for a in answers)
        ]

    def answers(self) -> dict[int, list[object]]:
        answers: dict[int, list[object]] = {}
        for message in self.bench.to_loop:
            if isinstance(message, ToSession) and isinstance(message.message, FirstToken | Failed | Refused):
                answers.setdefault(message.message.handle, []).append(message.message)
        return answers

    def assert_answers(self) -> None:
        answers = self.answers()
        for handle, token_ids in self.prompts.items():
            mine = answers.get(handle, [])
            kinds = [type(answer) for answer in mine]
            if handle not in self.aborted:
                assert kinds, f"attempt {handle} was never answered"
            assert kinds in ([], [FirstToken], [Failed], [Refused], [FirstToken, Failed]), kinds
            for answer in mine:
                if isinstance(answer, FirstToken):
                    assert answer.token_id == fake_rule.expected_choice(token_ids, key(5))[0]


@pytest.mark.parametrize("seed", range(12))
def test_each_attempt_is_answered_once_and_nothing_leaks(seed: int) -> None:
    Walk(seed).run(150)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(1, 300)), max_size=60),
    st.integers(16, 2000),
)
@settings(max_examples=200, deadline=None)
def test_credits_stay_within_their_bounds(acts: list[tuple[int, int, int]], queue_tokens: int) -> None:
    book = CreditBook(queue_tokens=queue_tokens, block_size=16, window_tokens=300)
    used: dict[int, list[int]] = {}
    told: dict[int, int] = {}
    for session_id, act, num_tokens in acts:
        if session_id not in used:
            book.open(session_id)
            used[session_id] = []
        elif act == 0 and len(used) > 1:
            book.close(session_id)
            del used[session_id]
            told.pop(session_id, None)
        elif act == 1:
            book.demand(session_id, num_tokens)
        elif act == 2 and book.take(session_id, num_tokens):
            used[session_id].append(num_tokens)
            assert book.used <= book.bound
        elif act == 3 and used[session_id]:
            book.give_back(session_id, used[session_id].pop())
        else:
            book.divide()
        told.update(book.news())
        assert book.used == sum(sum(tokens) for tokens in used.values())
        shares = {session: told[session] + sum(used[session]) for session in used}
        total = max(queue_tokens, 16 * len(used))
        assert total - len(used) < sum(shares.values()) <= total, "all is shared out, and no more"
        assert min(shares.values()) >= 16 or queue_tokens < 16
