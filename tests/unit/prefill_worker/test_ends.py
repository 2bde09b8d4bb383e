"""How the attempts of a prefill worker end, and what of them is kept."""

from __future__ import annotations

import pytest

from kv_transfer.messages import CommitLease, LeaseClosed, WithdrawLease
from pdserve.engine.fake_runner import FakeFaults
from pdserve.errors import InvariantViolated, StepFailed, WorkerLost
from pdserve.messages import (
    Abort,
    Failed,
    FirstToken,
    Refused,
)
from pdserve.worker.messages import (
    BeginDrain,
    CoreCounts,
    Drained,
    FromSession,
    SessionOpened,
)
from tests.unit.prefill_worker.bench import D2, PrefillBench, failure, prompt


class TestEnds:
    @pytest.mark.parametrize("num_turns", [0, 1, 9], ids=["queued", "prefilling", "sampled"])
    def test_abort_withdraws_in_every_state_and_says_nothing(self, num_turns: int) -> None:
        bench = PrefillBench(chunk_tokens=16)
        bench.start(1, 64)
        for _ in range(num_turns):
            bench.turn()
        bench.core.handle(FromSession(1, Abort(1)))
        bench.core.handle(FromSession(1, Abort(1)))
        bench.run()
        assert bench.leases(WithdrawLease) == [1]
        offered = sum(len(offer.block_ids) for offer in bench.offers(1))
        assert bench.engine.pool.counts().owned == offered, "what is offered waits for LeaseClosed"
        bench.close(1, WorkerLost("withdrawn"))
        assert not bench.said(Failed)
        bench.assert_at_rest()

    def test_tokens_of_an_aborted_prefill_are_counted(self) -> None:
        bench = PrefillBench(chunk_tokens=16)
        bench.start(1, 64)
        for _ in range(2):
            bench.turn()
        bench.core.handle(FromSession(1, Abort(1)))
        bench.start(2, 40)
        bench.run()
        engine = bench.engine
        assert (engine.num_aborted_prefill_tokens, engine.num_prefilled_tokens) == (32, 32 + 40)
        bench.clock.advance(1.0)
        bench.turn()
        [counts] = [each for each in bench.to_loop if isinstance(each, CoreCounts)][-1:]
        assert (counts.num_aborted_prefill_tokens, counts.num_prefilled_tokens) == (32, 32 + 40)

    def test_abort_of_another_session_or_handle_does_nothing(self) -> None:
        bench = PrefillBench()
        bench.core.handle(SessionOpened(2, "r2"))
        bench.start(1)
        bench.core.handle(FromSession(2, Abort(1)))
        bench.core.handle(FromSession(1, Abort(77)))
        bench.run()
        assert bench.leases(CommitLease) == [1]
        bench.close(1)
        bench.assert_at_rest()

    @pytest.mark.parametrize("num_turns", [0, 1, 9], ids=["queued", "prefilling", "sampled"])
    def test_the_end_of_the_session_ends_all_that_came_through_it(self, num_turns: int) -> None:
        bench = PrefillBench(chunk_tokens=16)
        bench.core.handle(SessionOpened(2, "r2"))
        bench.start(1, 64)
        bench.start(2, 16, session_id=2)
        for _ in range(num_turns):
            bench.turn()
        bench.close_session(1)
        bench.run()
        assert bench.leases(WithdrawLease) == [1]
        assert [first.handle for first in bench.said(FirstToken, 2) if isinstance(first, FirstToken)] == [2]
        bench.close(1, WorkerLost("withdrawn"))
        bench.close(2)
        bench.assert_at_rest()

    def test_a_final_one_is_withdrawn_when_its_router_is_gone(self) -> None:
        bench = PrefillBench()
        bench.start(1, max_tokens=1)
        bench.run()
        bench.close_session()
        assert bench.leases(WithdrawLease) == [1]
        bench.close(1, WorkerLost("withdrawn"))
        bench.assert_at_rest()

    @pytest.mark.parametrize("num_turns", [0, 1, 9], ids=["queued", "prefilling", "sampled"])
    def test_a_lost_lease_fails_the_attempt_once_and_keeps_full_blocks(self, num_turns: int) -> None:
        bench = PrefillBench(chunk_tokens=16)
        bench.start(1, 64)
        for _ in range(num_turns):
            bench.turn()
        bench.close(1, WorkerLost("the link has ended"), link_lost=True)
        assert [failure(message) for message in bench.said(Failed)] == ["WorkerLost"]
        assert bench.leases(WithdrawLease) == []
        bench.run()
        assert bench.engine.pool.counts().cached == min(num_turns, 4)
        bench.assert_at_rest()

    def test_blocks_of_a_lost_link_are_evicted_last(self) -> None:
        bench = PrefillBench(num_blocks=8, chunk_tokens=64)
        ids = prompt(64, 5)
        bench.start(1, ids)
        bench.run()
        bench.close(1, WorkerLost("the link has ended"), link_lost=True)
        bench.start(2, 64, to=D2)
        bench.run()
        bench.close(2)
        bench.start(3, 64, to=D2)
        bench.run()
        bench.close(3)
        bench.start(4, ids, to=D2)
        bench.turn()
        bench.run()
        first = bench.said(FirstToken)[-1]
        assert isinstance(first, FirstToken) and first.num_cached_tokens == 48
        bench.close(4)
        bench.assert_at_rest()

    def test_a_lease_confirmed_before_its_commit_is_a_bug(self) -> None:
        bench = PrefillBench()
        bench.start(1)
        with pytest.raises(InvariantViolated):
            bench.core.handle(LeaseClosed(1001, None, 0, False))

    def test_a_row_error_ends_its_attempt_only(self) -> None:
        bench = PrefillBench(faults=FakeFaults(row_token_ids=frozenset({250})))
        bench.start(1, (1, 2, 3, 250))
        bench.start(2, 20)
        bench.run()
        (failed,) = bench.said(Failed)
        assert failure(failed) == "RowFailed"
        assert bench.leases(WithdrawLease) == [1] and bench.leases(CommitLease) == [2]
        bench.close(1, WorkerLost("withdrawn"))
        bench.close(2)
        bench.assert_at_rest()

    def test_a_failed_step_gives_each_a_strike_and_the_second_is_final(self) -> None:
        bench = PrefillBench(faults=FakeFaults(step_token_ids=frozenset({250})))
        bench.start(1, (1, 2, 3, 250))
        bench.start(2, 20)
        bench.run()
        assert [failure(message) for message in bench.said(Failed)] == ["StepFailed"] * 2
        bench.start(3, (1, 2, 3, 250), strikes=1)
        bench.start(4, prompt(20, 2), strikes=1)
        bench.run()
        assert failure(bench.said(Failed)[-1]) == "RowFailed"
        assert bench.leases(CommitLease) == [4]
        for handle in (1, 2, 3):
            bench.close(handle, WorkerLost("withdrawn"))
        bench.close(4)
        bench.assert_at_rest()

    def test_an_unsound_engine_tells_the_routers_and_dies(self) -> None:
        bench = PrefillBench(faults=FakeFaults(failing_steps=frozenset({1}), sound=False))
        bench.start(1)
        with pytest.raises(StepFailed):
            bench.run()
        assert [failure(message) for message in bench.said(Failed)] == ["StepFailed"]


class TestDrain:
    def test_serves_what_it_has_and_takes_nothing_new(self) -> None:
        bench = PrefillBench()
        bench.start(1)
        bench.core.handle(BeginDrain(10.0))
        bench.start(2)
        bench.run()
        assert [failure(message) for message in bench.said(Refused)] == ["Draining"]
        assert bench.leases(CommitLease) == [1]
        assert not any(isinstance(message, Drained) for message in bench.to_loop)
        bench.close(1)
        assert [message for message in bench.to_loop if isinstance(message, Drained)] == [Drained()]
        bench.assert_at_rest()

    def test_at_its_limit_the_rest_ends_draining(self) -> None:
        bench = PrefillBench(num_blocks=4)
        bench.start(1, 64)
        bench.start(2, 64)
        bench.run()
        bench.core.handle(BeginDrain(10.0))
        bench.clock.advance(11.0)
        bench.turn()
        assert [failure(message) for message in bench.said(Failed)] == ["Draining", "Draining"]
        assert bench.leases(WithdrawLease) == [1, 2]
        bench.close(1, WorkerLost("withdrawn"))
        bench.close(2, WorkerLost("withdrawn"))
        assert any(isinstance(message, Drained) for message in bench.to_loop)
        bench.assert_at_rest()

    def test_an_idle_worker_is_drained_at_once(self) -> None:
        bench = PrefillBench()
        bench.core.handle(BeginDrain(10.0))
        bench.turn()
        assert Drained() in bench.to_loop
