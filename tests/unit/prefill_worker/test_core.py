"""What a prefill worker answers, offers and keeps, state by state."""

from __future__ import annotations

import pytest

from kv_transfer.messages import CommitLease, LeaseClosed, OpenLease, WithdrawLease
from pdserve.engine import fake_rule
from pdserve.engine.fake_runner import FakeFaults
from pdserve.errors import InvariantViolated, Revoked, StepFailed, WorkerLost
from pdserve.ids import Epoch, WorkerRef
from pdserve.messages import (
    Abort,
    Credits,
    Demand,
    Failed,
    FirstToken,
    Load,
    Phase,
    Progress,
    Refused,
    StartDecode,
)
from pdserve.worker.messages import (
    BeginDrain,
    CacheChanged,
    CoreCounts,
    Drained,
    EngineBeat,
    FromSession,
    LinkChanged,
    SessionOpened,
    ToAll,
)
from tests.unit.prefill_worker.bench import D1, D2, PrefillBench, key, prompt


def failure(message: object) -> str:
    assert isinstance(message, Failed | Refused)
    return message.failure.error


class TestOnePrompt:
    def test_chunks_are_offered_as_they_are_done_and_the_last_partial_block_with_the_last(self) -> None:
        bench = PrefillBench(chunk_tokens=32)
        bench.start(1, 72)
        assert bench.leases(OpenLease) == [1]
        bench.turn()
        assert [offer.upto for offer in bench.offers(1)] == [2]
        bench.run()
        offers = bench.offers(1)
        assert [offer.upto for offer in offers] == [2, 4, 5]
        assert [len(offer.block_ids) for offer in offers] == [2, 2, 1]
        assert bench.leases(CommitLease) == [1]
        token = fake_rule.expected_choice(prompt(72, 1), key())[0]
        (first,) = bench.said(FirstToken)
        assert isinstance(first, FirstToken)
        assert (first.token_id, first.reason) == (token, None)
        commit = next(message for message in bench.to_transfer if isinstance(message, CommitLease))
        assert commit.first_token == token
        bench.close(1)
        assert not bench.said(Failed)
        assert bench.engine.pool.counts().cached == 4
        bench.assert_at_rest()

    def test_blocks_stay_owned_until_the_lease_is_closed(self) -> None:
        bench = PrefillBench()
        bench.start(1, 40)
        bench.run()
        assert bench.engine.pool.counts().owned == 3
        bench.close(1)
        bench.assert_at_rest()

    def test_skipped_blocks_are_not_offered(self) -> None:
        bench = PrefillBench()
        bench.start(1, 40, skip=2)
        bench.run()
        assert [(offer.upto, len(offer.block_ids)) for offer in bench.offers(1)] == [(3, 1)]
        bench.close(1)
        bench.assert_at_rest()

    def test_a_prompt_that_the_decode_worker_has_whole_offers_nothing_and_commits(self) -> None:
        bench = PrefillBench()
        bench.start(1, 32, skip=2)
        bench.run()
        assert bench.offers(1) == []
        assert bench.leases(CommitLease) == [1]
        bench.close(1)
        bench.assert_at_rest()

    def test_own_hits_are_offered_at_once(self) -> None:
        bench = PrefillBench(chunk_tokens=16)
        ids = prompt(64, 9)
        bench.start(1, ids)
        bench.run()
        bench.close(1)
        bench.start(2, ids)
        bench.turn()
        assert [offer.upto for offer in bench.offers(2)] == [3, 4], "three hits, then the computed block"
        (_, first) = bench.said(FirstToken)
        assert isinstance(first, FirstToken) and first.num_cached_tokens == 48
        bench.close(2)
        bench.assert_at_rest()

    def test_a_final_first_token_commits_nothing_and_is_no_failure(self) -> None:
        bench = PrefillBench()
        bench.start(1, 40, max_tokens=1)
        bench.run()
        (first,) = bench.said(FirstToken)
        assert isinstance(first, FirstToken) and first.final
        assert bench.leases(CommitLease) == [] and bench.leases(WithdrawLease) == []
        bench.close(1, Revoked("the router aborted the decode worker"))
        assert not bench.said(Failed)
        bench.assert_at_rest()

    def test_a_lease_that_nobody_ends_after_a_final_first_token_is_given_up(self) -> None:
        bench = PrefillBench()
        bench.start(1, 40, max_tokens=1)
        bench.run()
        bench.clock.advance(4.5)
        bench.turn()
        assert bench.leases(WithdrawLease) == []
        bench.clock.advance(1.0)
        bench.turn()
        assert bench.leases(WithdrawLease) == [1]
        bench.close(1, WorkerLost("withdrawn"))
        assert not bench.said(Failed)
        bench.assert_at_rest()

    def test_times_are_of_the_queue_and_of_the_prefill(self) -> None:
        bench = PrefillBench(chunk_tokens=32)
        bench.start(1, 64)
        bench.clock.advance(0.25)
        bench.turn()
        bench.clock.advance(0.5)
        bench.run()
        (first,) = bench.said(FirstToken)
        assert isinstance(first, FirstToken)
        assert (first.queue_s, first.prefill_s) == (0.25, 0.5)
        bench.close(1)

    def test_progress_comes_with_each_chunk_and_heartbeat(self) -> None:
        bench = PrefillBench(chunk_tokens=16)
        bench.start(1, 64)
        assert bench.said(Progress) == [Progress(1, Phase.QUEUED, 0)]
        bench.run()
        amounts = [message.amount for message in bench.said(Progress) if isinstance(message, Progress)]
        assert amounts == [0, 0, 16, 32, 48]
        bench.close(1)

    def test_progress_of_a_queued_one_comes_with_each_heartbeat(self) -> None:
        bench = PrefillBench(num_blocks=4)
        bench.start(1, 64)
        bench.start(2, 64)
        bench.run()
        num_before = len(bench.said(Progress))
        bench.clock.advance(0.6)
        bench.turn()
        assert bench.said(Progress)[num_before:] == [Progress(2, Phase.QUEUED, 0)]
        bench.close(1)
        bench.run()
        bench.close(2)
        bench.assert_at_rest()


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


class TestRefusals:
    def test_an_unknown_or_other_epochs_link(self) -> None:
        bench = PrefillBench(links=(D1,))
        bench.start(1, to=D2)
        bench.start(2, to=WorkerRef("d1", Epoch(2, 0)))
        assert [failure(message) for message in bench.said(Refused)] == ["WorkerLost", "WorkerLost"]
        bench.core.handle(LinkChanged(D1, False))
        bench.start(3, to=D1)
        assert len(bench.said(Refused)) == 3
        assert bench.to_transfer == []

    def test_a_full_queue(self) -> None:
        bench = PrefillBench(num_blocks=8, queue_tokens=64)  # window 128: bound 64 + 128
        bench.start(1, 100)
        bench.start(2, 92)
        bench.start(3, 16)
        (refused,) = bench.said(Refused)
        assert failure(refused) == "Overloaded"
        bench.run()
        bench.close(1)
        bench.run()
        bench.close(2)
        bench.assert_at_rest()

    def test_a_prompt_over_the_window_and_a_skip_over_the_prompt(self) -> None:
        bench = PrefillBench(num_blocks=4)
        bench.start(1, 65)
        bench.start(2, 20, skip=2)
        assert [failure(message) for message in bench.said(Refused)] == ["InvalidRequest"] * 2

    def test_a_start_decode(self) -> None:
        bench = PrefillBench()
        message = StartDecode(
            handle=5, token_ids=(1, 2), num_prompt_tokens=2, key=key(), deadline_left_s=1.0, num_strikes=0, source=None
        )  # fmt: skip
        bench.core.handle(FromSession(1, message))
        assert [failure(refused) for refused in bench.said(Refused)] == ["InvalidRequest"]

    def test_a_handle_used_twice_is_ignored_and_counted(self) -> None:
        bench = PrefillBench()
        bench.start(1)
        bench.start(1)
        bench.run()
        assert bench.leases(OpenLease) == [1]
        bench.clock.advance(1.0)
        bench.turn()
        counts = [message for message in bench.to_loop if isinstance(message, CoreCounts)]
        assert counts[-1].num_ignored == 1
        bench.close(1)


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


class TestReports:
    def test_load_beat_and_cache_changes(self) -> None:
        bench = PrefillBench()
        bench.start(1, 40)
        bench.run()
        bench.close(1)
        bench.clock.advance(1.0)
        bench.turn()
        loads = [m.message for m in bench.to_loop if isinstance(m, ToAll) and isinstance(m.message, Load)]
        assert loads[-1].blocks.cached == 2 and loads[-1].num_queued_tokens == 0
        beats = [message for message in bench.to_loop if isinstance(message, EngineBeat)]
        assert (beats[-1].num_steps, beats[-1].has_work) == (1, False)
        changes = [message for message in bench.to_loop if isinstance(message, CacheChanged)]
        assert [len(message.changes) for message in changes] == [2]

    def test_an_idle_core_wakes_for_heartbeats_only(self) -> None:
        bench = PrefillBench()
        bench.turn()
        bench.clock.advance(0.1)
        bench.turn()
        assert bench.turn() == pytest.approx(0.4)
