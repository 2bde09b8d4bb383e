"""Which prompt of a prefill worker is next, and how many tokens its routers may send."""

from __future__ import annotations

from kv_transfer.messages import CommitLease, WithdrawLease
from pdserve.errors import WorkerLost
from pdserve.messages import (
    Abort,
    Credits,
    Demand,
    Failed,
    FirstToken,
    Phase,
    Progress,
)
from pdserve.worker.messages import (
    FromSession,
    SessionOpened,
)
from tests.unit.prefill_worker.bench import D1, D2, PrefillBench, failure


class TestQueue:
    def test_waits_for_all_blocks_and_nobody_passes(self) -> None:
        bench = PrefillBench(num_blocks=8)
        bench.start(1, 80)
        bench.run()
        bench.start(2, 80, to=D2)
        bench.start(3, 16, to=D2)
        bench.run()
        assert [first.handle for first in bench.said(FirstToken) if isinstance(first, FirstToken)] == [1]
        bench.close(1)
        bench.run()
        bench.close(2)
        bench.run()
        bench.close(3)
        assert len(bench.said(FirstToken)) == 3
        bench.assert_at_rest()

    def test_a_short_prompt_passes_long_ones_and_is_done_in_the_next_step(self) -> None:
        bench = PrefillBench(num_blocks=100, queue_tokens=4096, chunk_tokens=64)
        bench.start(1, 600)
        bench.start(2, 600)
        bench.turn()
        bench.start(3, 20, to=D2)
        bench.turn()
        assert [first.handle for first in bench.said(FirstToken) if isinstance(first, FirstToken)] == [3]
        assert [seq.handle for seq in bench.engine.sequences] == [1], "the other long one holds no blocks yet"
        for handle in (3, 1, 2):
            bench.run()
            bench.close(handle)
        bench.assert_at_rest()

    def test_a_slow_link_holds_a_quarter_of_the_pool_and_others_pass(self) -> None:
        bench = PrefillBench(num_blocks=16)
        bench.start(1, 48)
        bench.run()
        bench.start(2, 32, to=D1)  # 3 un-acked + 2 > 16 / 4
        bench.start(3, 32, to=D2)
        bench.start(4, 16, to=D1)  # would fit, but stands behind 2
        bench.run()
        assert bench.leases(CommitLease) == [1, 3]
        bench.close(1)
        bench.run()
        assert bench.leases(CommitLease) == [1, 3, 2, 4]
        for handle in (3, 2, 4):
            bench.close(handle)
        bench.assert_at_rest()

    def test_what_sends_nothing_does_not_wait_for_its_link(self) -> None:
        bench = PrefillBench(num_blocks=16)
        bench.start(1, 48)
        bench.run()
        bench.start(2, 32)  # 3 un-acked + 2 > 16 / 4
        bench.start(3, 64, max_tokens=1)
        bench.run()
        assert [first.handle for first in bench.said(FirstToken) if isinstance(first, FirstToken)] == [1, 3]
        bench.close(1)
        bench.run()
        assert bench.leases(CommitLease) == [1, 2]
        for handle in (2, 3):
            bench.close(handle)
        bench.assert_at_rest()

    def test_a_prompt_beyond_the_quarter_starts_on_a_free_link(self) -> None:
        bench = PrefillBench(num_blocks=8)
        bench.start(1, 96)
        bench.run()
        assert bench.leases(CommitLease) == [1]
        bench.close(1)
        bench.assert_at_rest()

    def test_the_next_prompt_begins_when_a_step_has_room(self) -> None:
        bench = PrefillBench(chunk_tokens=32)
        bench.start(1, 96)
        bench.start(2, 96)
        bench.turn()
        assert len(bench.engine.sequences) == 1, "the second one keeps its blocks to others until it can run"
        bench.run()
        assert bench.leases(CommitLease) == [1, 2]
        bench.close(1)
        bench.close(2)
        bench.assert_at_rest()

    def test_the_deadline_ends_a_queued_and_a_running_one(self) -> None:
        bench = PrefillBench(num_blocks=4, chunk_tokens=16)
        bench.start(1, 64, deadline_s=2.0)
        bench.start(2, 64, deadline_s=1.0)
        bench.turn()
        bench.clock.advance(1.5)
        bench.turn()
        assert [failure(message) for message in bench.said(Failed)] == ["DeadlineExceeded"]
        bench.clock.advance(1.0)
        bench.turn()
        assert [failure(message) for message in bench.said(Failed)] == ["DeadlineExceeded"] * 2
        assert bench.leases(WithdrawLease) == [2, 1]
        bench.close(1, WorkerLost("withdrawn"))
        bench.close(2, WorkerLost("withdrawn"))
        assert len(bench.said(Failed)) == 2, "each attempt is answered once"
        bench.assert_at_rest()


class TestCredits:
    def test_the_balance_falls_with_the_acceptance_and_returns_with_the_first_chunk(self) -> None:
        bench = PrefillBench(queue_tokens=100)
        bench.start(1, 40)
        bench.turn()
        balances = [message.balance for message in bench.said(Credits) if isinstance(message, Credits)]
        assert balances == [100, 60, 100]
        said = [
            m.message
            for m in bench.to_loop
            if hasattr(m, "message") and isinstance(m.message, Credits | Progress)
        ]
        assert said.index(Credits(60)) < said.index(Progress(1, Phase.QUEUED, 0))
        bench.run()
        bench.close(1)

    def test_it_returns_when_a_queued_attempt_ends(self) -> None:
        bench = PrefillBench(queue_tokens=100)
        bench.start(1, 40)
        bench.core.handle(FromSession(1, Abort(1)))
        bench.turn()
        assert bench.said(Credits)[-1] == Credits(100)
        bench.close(1, WorkerLost("withdrawn"))

    def test_shares_follow_the_demand_at_the_next_heartbeat(self) -> None:
        bench = PrefillBench(queue_tokens=1000)
        bench.core.handle(SessionOpened(2, "r2"))
        bench.turn()
        assert bench.said(Credits, 2) == [Credits(500)]
        bench.core.handle(FromSession(2, Demand(900)))
        bench.clock.advance(0.6)
        bench.turn()
        assert bench.said(Credits, 2)[-1] == Credits(942)
        assert bench.said(Credits, 1)[-1] == Credits(58)
        bench.close_session(2)
        bench.turn()
        assert bench.said(Credits, 1)[-1] == Credits(1000)
