"""What a decode worker grants, answers and frees, state by state."""

from __future__ import annotations

import pytest

from kv_transfer.messages import EndLease, ExpectLease, LeaseReleased
from pdserve.engine.block_pool import BlockState
from pdserve.engine.fake_runner import FakeFaults
from pdserve.errors import KvCorrupt, StepFailed
from pdserve.messages import (
    Abort,
    DecodeStarted,
    Failed,
    Granted,
    Load,
    Phase,
    Progress,
    Refused,
    SequenceFinished,
    StartPrefill,
    Step,
    Waiting,
)
from pdserve.sampling import FinishReason
from pdserve.worker.messages import BeginDrain, Drained, FromSession, SessionOpened, ToAll, ToSession
from tests.unit.decode_worker.bench import P1, DecodeBench, key, prompt


def failure(message: object) -> str:
    assert isinstance(message, Failed | Refused)
    return message.failure.error


def failures(bench: DecodeBench, session_id: int = 1) -> list[tuple[int, str]]:
    return [(m.handle, failure(m)) for m in bench.said(Failed, session_id) if isinstance(m, Failed)]


class TestOneHandOff:
    def test_grant_adopt_run_finish(self) -> None:
        bench = DecodeBench()
        bench.start(1, 40)
        (granted,) = bench.granted()
        assert granted.num_cached_blocks == 0
        block_ids = bench.expect(1).block_ids
        assert bench.to_transfer == [ExpectLease(granted.lease_id, P1, 0, block_ids)]
        assert len(block_ids) == 3 == bench.engine.pool.counts().granted
        assert {bench.engine.pool.state(block_id) for block_id in block_ids} == {BlockState.GRANTED}
        bench.hand_off(1)
        assert bench.engine.pool.counts().owned == 3
        bench.run()
        assert bench.tokens(1) == bench.expected(1)
        (finished,) = bench.said(SequenceFinished)
        assert isinstance(finished, SequenceFinished)
        assert (finished.reason, finished.num_tokens) == (FinishReason.LENGTH, 48)
        bench.assert_at_rest()
        assert bench.engine.pool.counts().cached == 2, "48 ids, but the last one was never computed"

    def test_started_carries_the_transfers_figures(self) -> None:
        bench = DecodeBench()
        bench.start(1, 40)
        bench.hand_off(1)
        (started,) = bench.said(DecodeStarted)
        assert isinstance(started, DecodeStarted)
        assert (started.received_bytes, started.transport, started.transfer_s) == (4096, "stream", 0.2)
        assert (started.transfer_exposed_s, started.commit_s) == (0.1, 0.01)
        bench.clock.advance(0.5)
        bench.run()
        (finished,) = bench.said(SequenceFinished)
        assert isinstance(finished, SequenceFinished) and finished.decode_queue_s == 0.5

    def test_a_block_for_the_token_behind_a_full_one_is_granted_too(self) -> None:
        bench = DecodeBench()
        bench.start(1, 32)
        assert bench.engine.pool.counts().granted == 3
        assert len(bench.expect(1).block_ids) == 2, "nothing comes for the third over the link"
        bench.hand_off(1)
        bench.run()
        assert bench.tokens(1) == bench.expected(1)
        bench.assert_at_rest()

    def test_hits_are_pinned_and_not_sent(self) -> None:
        bench = DecodeBench()
        ids = prompt(64, 3)
        bench.start(1, ids)
        bench.hand_off(1)
        bench.run()
        bench.start(2, (*ids, 5, 6))
        granted = bench.granted()[-1]
        assert granted.num_cached_blocks == 4
        expect = bench.to_transfer[-1]
        assert isinstance(expect, ExpectLease)
        assert (expect.lease_id, expect.num_skip, len(expect.block_ids)) == (granted.lease_id, 4, 1)
        assert bench.engine.pool.counts().owned == 4
        bench.hand_off(2)
        bench.run()
        assert bench.tokens(2) == bench.expected(2)
        bench.assert_at_rest()

    def test_a_prompt_that_is_here_whole_is_handed_off_without_a_pull(self) -> None:
        bench = DecodeBench()
        ids = prompt(64, 3)
        bench.start(1, ids)
        bench.hand_off(1)
        bench.run()
        bench.start(2, ids)
        assert bench.granted()[-1].num_cached_blocks == 4
        bench.hand_off(2)
        bench.run()
        assert bench.tokens(2) == bench.expected(2)
        started = bench.said(DecodeStarted)[-1]
        assert isinstance(started, DecodeStarted) and started.num_cached_tokens == 64
        bench.assert_at_rest()

    def test_replayed_tokens_count_as_generated(self) -> None:
        bench = DecodeBench()
        ids = prompt(40, 3)
        bench.start(1, ids)
        bench.hand_off(1)
        bench.run()
        whole = bench.tokens(1)
        bench.start(2, (*ids, *whole[:3]), num_prompt=40)
        bench.hand_off(2)
        bench.run()
        assert bench.tokens(2) == whole[3:]
        bench.assert_at_rest()

    def test_a_first_token_that_ends_the_text_finishes_at_once(self) -> None:
        bench = DecodeBench()
        bench.start(1, 40)
        bench.pulled(1, 3)
        bench.confirm(1, first_token=256)
        (finished,) = bench.said(SequenceFinished)
        assert isinstance(finished, SequenceFinished) and finished.reason is FinishReason.EOS
        bench.assert_at_rest()

    def test_all_tokens_of_a_step_travel_in_one_message_a_session(self) -> None:
        bench = DecodeBench()
        bench.core.handle(SessionOpened(2, "r2"))
        for handle, session_id in ((1, 1), (2, 1), (3, 2)):
            bench.start(handle, 20, session_id=session_id)
            bench.hand_off(handle)
        bench.turn()
        (step,) = bench.said(Step)
        assert isinstance(step, Step) and [part.handle for part in step.sequences] == [1, 2]
        assert len(bench.said(Step, 2)) == 1
        bench.run()
        last_step = max(
            index
            for index, m in enumerate(bench.to_loop)
            if isinstance(m, ToSession) and isinstance(m.message, Step)
        )
        first_end = min(
            index
            for index, m in enumerate(bench.to_loop)
            if isinstance(m, ToSession) and isinstance(m.message, SequenceFinished)
        )
        assert last_step < first_end, "no token after its end"
        bench.assert_at_rest()

    def test_progress_while_pulling_and_running(self) -> None:
        bench = DecodeBench()
        bench.start(1, 40)
        bench.pulled(1, 2)
        bench.clock.advance(0.6)
        bench.turn()
        assert bench.said(Progress)[-1] == Progress(1, Phase.PULLING, 2)
        bench.hand_off(1)
        bench.clock.advance(0.6)
        bench.turn()
        assert bench.said(Progress)[-1] == Progress(1, Phase.RUNNING, 1)
        bench.run()


class TestWaiting:
    def test_waits_then_is_granted_when_blocks_come_free(self) -> None:
        bench = DecodeBench(num_blocks=6)
        bench.start(1, 64)
        bench.start(2, 64)
        assert bench.said(Waiting) == [Waiting(2, 0)]
        bench.hand_off(1)
        bench.run()
        assert [granted.handle for granted in bench.granted()] == [1, 2]
        bench.hand_off(2)
        bench.run()
        assert bench.tokens(2) == bench.expected(2)
        bench.assert_at_rest()

    def test_full_list_refuses_with_retry_after(self) -> None:
        bench = DecodeBench(num_blocks=6, max_waiting=1)
        for handle in (1, 2, 3):
            bench.start(handle, 64)
        (refused,) = bench.said(Refused)
        assert isinstance(refused, Refused) and refused.handle == 3 and failure(refused) == "Overloaded"
        assert "retry_after_s" in refused.failure.fields
        bench.close_session()
        bench.retire(1)
        bench.assert_at_rest()

    def test_order_is_priority_then_age(self) -> None:
        bench = DecodeBench(num_blocks=6)
        bench.start(1, 64)
        bench.start(2, 64)
        bench.start(3, 64, age_s=0.5)
        bench.start(4, 64, priority=1)
        places = {m.handle: m.place for m in bench.said(Waiting) if isinstance(m, Waiting)}
        assert places == {4: 0, 3: 1, 2: 2}
        for handle in (1, 4, 3, 2):
            bench.hand_off(handle)
            bench.run()
        assert [granted.handle for granted in bench.granted()] == [1, 4, 3, 2]
        bench.assert_at_rest()

    def test_small_ones_overtake_until_the_oldest_has_waited_a_second(self) -> None:
        bench = DecodeBench(num_blocks=8)
        bench.start(1, 60)
        bench.start(2, 100)
        bench.start(3, 12)
        assert [granted.handle for granted in bench.granted()] == [1, 3]
        bench.clock.advance(1.0)
        bench.turn()
        bench.start(4, 12, priority=9)
        assert [granted.handle for granted in bench.granted()] == [1, 3]
        for handle in (1, 3):
            bench.hand_off(handle)
        bench.run()
        assert [granted.handle for granted in bench.granted()][:3] == [1, 3, 2]
        bench.hand_off(2)
        bench.run()
        bench.hand_off(4)
        bench.run()
        bench.assert_at_rest()

    def test_the_deadline_and_abort_end_a_waiting_one(self) -> None:
        bench = DecodeBench(num_blocks=6)
        bench.start(1, 64)
        bench.start(2, 64, deadline_s=1.0)
        bench.start(3, 64)
        bench.core.handle(FromSession(1, Abort(3)))
        bench.clock.advance(1.5)
        bench.turn()
        assert failures(bench) == [(2, "DeadlineExceeded")]
        bench.hand_off(1)
        bench.run()
        assert len(bench.granted()) == 1
        bench.assert_at_rest()

    def test_no_more_grants_than_rows_in_a_batch(self) -> None:
        bench = DecodeBench(max_batch=2)
        for handle in (1, 2, 3):
            bench.start(handle, 20)
        assert len(bench.granted()) == 2
        bench.hand_off(1)
        bench.run()
        assert [granted.handle for granted in bench.granted()] == [1, 2, 3]
        bench.close_session()
        bench.retire(2)
        bench.retire(3)
        bench.assert_at_rest()


class TestRefusals:
    def test_over_the_window_or_nothing_to_generate(self) -> None:
        bench = DecodeBench(num_blocks=4)
        bench.start(1, 60, max_tokens=5)
        bench.start(2, 60, max_tokens=8, num_prompt=52)
        bench.start(3, 10, num_prompt=11)
        assert [failure(message) for message in bench.said(Refused)] == ["InvalidRequest"] * 3

    def test_a_start_prefill(self) -> None:
        bench = DecodeBench()
        message = StartPrefill(
            handle=5, token_ids=(1, 2), num_prompt_tokens=2, key=key(), deadline_left_s=1.0, num_strikes=0,
            lease_id=9, decode_worker=P1, num_skip_blocks=0,
        )  # fmt: skip
        bench.core.handle(FromSession(1, message))
        assert [failure(refused) for refused in bench.said(Refused)] == ["InvalidRequest"]

    def test_a_handle_used_twice_is_ignored(self) -> None:
        bench = DecodeBench()
        bench.start(1, 20)
        bench.start(1, 20)
        assert len(bench.granted()) == 1
        bench.hand_off(1)
        bench.run()
        bench.assert_at_rest()


class TestEnds:
    def test_abort_of_a_grant_frees_its_blocks_only_when_retired(self) -> None:
        bench = DecodeBench()
        bench.start(1, 40)
        bench.core.handle(FromSession(1, Abort(1)))
        assert bench.engine.pool.counts().granted == 3
        bench.retire(1)
        assert failures(bench) == []
        bench.assert_at_rest()

    def test_a_hand_off_that_crosses_the_abort_does_not_start(self) -> None:
        bench = DecodeBench()
        bench.start(1, 40)
        bench.core.handle(FromSession(1, Abort(1)))
        bench.confirm(1)
        assert not bench.said(DecodeStarted)
        bench.assert_at_rest()

    def test_abort_by_another_router_does_nothing(self) -> None:
        bench = DecodeBench()
        bench.core.handle(SessionOpened(2, "r2"))
        bench.start(1, 20)
        bench.core.handle(FromSession(2, Abort(1)))
        bench.hand_off(1)
        bench.core.handle(FromSession(2, Abort(1)))
        bench.run()
        assert bench.ended_leases() == [] and bench.tokens(1) == bench.expected(1)
        bench.assert_at_rest()

    def test_abort_of_a_running_one_stops_at_once_and_keeps_its_cache(self) -> None:
        bench = DecodeBench()
        bench.start(1, 40, max_tokens=100)
        bench.hand_off(1)
        bench.turn()
        bench.core.handle(FromSession(1, Abort(1)))
        bench.core.handle(FromSession(1, Abort(1)))
        bench.run()
        assert bench.said(SequenceFinished) == [] and failures(bench) == []
        assert bench.engine.pool.counts().cached == 2
        bench.assert_at_rest()

    def test_a_lost_link_fails_the_grant_at_once(self) -> None:
        bench = DecodeBench()
        bench.start(1, 40)
        bench.start(2, 40)
        bench.retire(1)
        bench.retire(2)
        assert failures(bench) == [(1, "WorkerLost"), (2, "WorkerLost")]
        assert not any(isinstance(message, EndLease) for message in bench.to_transfer)
        bench.assert_at_rest()

    def test_corrupt_kv_is_never_cached(self) -> None:
        bench = DecodeBench()
        bench.start(1, 40)
        bench.retire(1, KvCorrupt("checksum"))
        assert failures(bench) == [(1, "KvCorrupt")]
        assert bench.engine.pool.counts().free == bench.num_blocks

    def test_quarantined_blocks_wait_for_released(self) -> None:
        bench = DecodeBench()
        bench.start(1, 40)
        bench.retire(1, quarantine=True)
        assert bench.engine.pool.counts().quarantined == 3
        bench.core.handle(LeaseReleased(bench.lease(1)))
        bench.assert_at_rest()

    def test_the_end_of_the_session_ends_every_state(self) -> None:
        bench = DecodeBench(num_blocks=12)
        bench.core.handle(SessionOpened(2, "r2"))
        bench.start(1, 40)
        bench.hand_off(1)
        bench.start(2, 40, session_id=2)
        bench.start(3, 40)
        bench.start(4, 100)
        bench.turn()
        bench.close_session(1)
        assert bench.ended_leases() == [bench.lease(3)]
        bench.retire(3)
        bench.hand_off(2)
        bench.run()
        assert bench.tokens(2, session_id=2) == bench.expected(2)
        assert not bench.said(Failed)
        bench.assert_at_rest()

    def test_the_deadline_ends_a_grant_and_a_running_one(self) -> None:
        bench = DecodeBench()
        bench.start(1, 40, deadline_s=1.0)
        bench.start(2, 40, deadline_s=1.0, max_tokens=100)
        bench.hand_off(2)
        bench.turn()
        bench.clock.advance(2.0)
        bench.turn()
        assert failures(bench) == [(1, "DeadlineExceeded"), (2, "DeadlineExceeded")]
        bench.retire(1)
        assert len(failures(bench)) == 2
        bench.assert_at_rest()

    def test_a_row_error_ends_its_sequence_only(self) -> None:
        bench = DecodeBench(faults=FakeFaults(row_token_ids=frozenset({250})))
        bench.start(1, (1, 2, 3, 250), local=True)
        bench.start(2, 20)
        bench.hand_off(2)
        bench.run()
        assert failures(bench) == [(1, "RowFailed")]
        assert bench.tokens(2) == bench.expected(2)
        bench.assert_at_rest()

    def test_a_failed_step_gives_each_a_strike_and_the_second_is_final(self) -> None:
        bench = DecodeBench(faults=FakeFaults(step_token_ids=frozenset({250})))
        bench.start(1, (1, 2, 3, 250), local=True)
        bench.start(2, 20, local=True)
        bench.run()
        assert failures(bench) == [(1, "StepFailed"), (2, "StepFailed")]
        bench.start(3, (1, 2, 3, 250), local=True, strikes=1)
        bench.start(4, 20, local=True, strikes=1)
        bench.run()
        assert failures(bench)[2:] == [(3, "RowFailed")]
        assert bench.tokens(4) == bench.expected(4)
        bench.assert_at_rest()

    def test_an_unsound_engine_tells_the_routers_and_dies(self) -> None:
        bench = DecodeBench(faults=FakeFaults(failing_steps=frozenset({1}), sound=False))
        bench.start(1, 20, local=True)
        with pytest.raises(StepFailed):
            bench.run()
        assert failures(bench) == [(1, "StepFailed")]


class TestLocalPrefill:
    @pytest.mark.parametrize("decode_prefill_tokens", [16, None], ids=["decode", "both"])
    def test_prefills_here_and_runs(self, decode_prefill_tokens: int | None) -> None:
        bench = DecodeBench(decode_prefill_tokens=decode_prefill_tokens)
        bench.start(1, 100, local=True)
        assert bench.granted() == [Granted(1, 0, 0)]
        assert bench.to_transfer == []
        bench.run()
        assert bench.tokens(1) == bench.expected(1)
        (finished,) = bench.said(SequenceFinished)
        assert isinstance(finished, SequenceFinished) and finished.num_tokens == 108
        phases = [message.phase for message in bench.said(Progress) if isinstance(message, Progress)]
        assert Phase.PREFILLING in phases
        bench.assert_at_rest()

    def test_one_token_is_started_then_finished(self) -> None:
        bench = DecodeBench()
        bench.start(1, 40, local=True, max_tokens=1)
        bench.run()
        assert (
            len(bench.said(DecodeStarted)) == 1
            and len(bench.said(SequenceFinished)) == 1
            and not bench.said(Step)
        )
        bench.assert_at_rest()

    def test_waits_like_any_other(self) -> None:
        bench = DecodeBench(num_blocks=6)
        bench.start(1, 64)
        bench.start(2, 64, local=True)
        assert bench.said(Waiting) == [Waiting(2, 0)]
        bench.hand_off(1)
        bench.run()
        assert bench.tokens(2) == bench.expected(2)
        bench.assert_at_rest()

    def test_hits_leave_a_token_to_compute(self) -> None:
        bench = DecodeBench()
        ids = prompt(64, 3)
        for handle in (1, 2):
            bench.start(handle, ids, local=True)
            bench.run()
            assert bench.tokens(handle) == bench.expected(handle)
        assert bench.granted()[-1] == Granted(2, 0, 3)
        bench.assert_at_rest()


class TestShortOfBlocks:
    def test_a_grant_is_revoked_ahead_so_that_nobody_is_preempted(self) -> None:
        bench = DecodeBench(num_blocks=8)
        bench.start(1, 60, max_tokens=40)
        bench.hand_off(1)
        bench.start(2, 40)
        while not bench.ended_leases():
            bench.turn()
        bench.retire(2)
        bench.run()
        assert failures(bench) == [(2, "Revoked")]
        phases = [message.phase for message in bench.said(Progress) if isinstance(message, Progress)]
        assert Phase.PREEMPTED not in phases
        assert bench.tokens(1) == bench.expected(1)
        bench.assert_at_rest()

    def test_the_youngest_grant_is_revoked_first(self) -> None:
        bench = DecodeBench(num_blocks=10)
        bench.start(1, 60, max_tokens=40)
        bench.hand_off(1)
        for handle in (2, 3):
            bench.start(handle, 20)
        while not bench.ended_leases():
            bench.turn()
        bench.retire(3)
        bench.run()
        assert failures(bench) == [(3, "Revoked")]
        bench.hand_off(2)
        bench.run()
        assert bench.tokens(2) == bench.expected(2)
        bench.assert_at_rest()

    def test_a_committed_grant_is_not_revoked(self) -> None:
        bench = DecodeBench(num_blocks=8)
        bench.start(1, 60, max_tokens=40)
        bench.hand_off(1)
        bench.start(2, 40)
        bench.pulled(2, 3)
        bench.run()
        assert failures(bench) == [] and bench.ended_leases() == []
        bench.hand_off(2)
        bench.run()
        assert bench.tokens(1) == bench.expected(1)
        assert bench.tokens(2) == bench.expected(2)
        bench.assert_at_rest()

    def test_the_youngest_is_preempted_and_comes_back_before_new_grants(self) -> None:
        bench = DecodeBench(num_blocks=9)
        for handle in (1, 2):
            bench.start(handle, 30, max_tokens=60)
            bench.hand_off(handle)
            bench.clock.advance(0.1)
        preempted = False
        while bench.turn() == 0.0:
            if bench.engine.num_preempted and not preempted:
                preempted = True
                bench.start(3, 20)
                assert len(bench.granted()) == 2, "nothing new while somebody waits to come back"
        assert preempted
        for handle in (1, 2):
            assert bench.tokens(handle) == bench.expected(handle)
        bench.hand_off(3)
        bench.run()
        assert bench.tokens(3) == bench.expected(3)
        phases = [message.phase for message in bench.said(Progress) if isinstance(message, Progress)]
        assert Phase.PREEMPTED in phases
        bench.assert_at_rest()

    def test_a_long_victim_is_handed_back(self) -> None:
        bench = DecodeBench(num_blocks=9, recompute_max_tokens=32)
        for handle in (1, 2):
            bench.start(handle, 30, max_tokens=60)
            bench.hand_off(handle)
            bench.clock.advance(0.1)
        bench.run()
        assert failures(bench) == [(2, "HandedBack")]
        assert bench.tokens(1) == bench.expected(1)
        bench.assert_at_rest()

    def test_preempted_ones_take_grants_back_when_nothing_runs(self) -> None:
        bench = DecodeBench(num_blocks=9)
        for handle in (1, 2):
            bench.start(handle, 30, max_tokens=60)
            bench.hand_off(handle)
            bench.clock.advance(0.1)
        while not bench.engine.num_preempted:
            bench.turn()
        bench.core.handle(FromSession(1, Abort(1)))
        bench.run()
        assert bench.tokens(2) == bench.expected(2)
        bench.assert_at_rest()

    @pytest.mark.parametrize("quarantined", [False, True])
    def test_a_grant_leaves_the_oldest_its_way_to_the_end(self, quarantined: bool) -> None:
        """Of what it might need, blocks of committed grants and quarantined ones can't be taken back."""
        bench = DecodeBench(num_blocks=10)
        bench.start(1, 30, max_tokens=100)  # 9 blocks at its end
        bench.hand_off(1)
        bench.start(2, 40)
        bench.pulled(2, 3)
        if quarantined:
            bench.core.handle(FromSession(1, Abort(2)))
            bench.retire(2, quarantine=True)
        bench.start(3, 20)
        assert bench.engine.pool.available >= 4
        assert bench.said(Waiting) == [Waiting(3, 0)]
        if quarantined:
            bench.core.handle(LeaseReleased(bench.lease(2)))
        else:
            bench.hand_off(2)
        bench.turn()
        assert len(bench.granted()) == 3

    def test_a_grant_leaves_a_block_to_grow_for_all_that_run(self) -> None:
        bench = DecodeBench(num_blocks=6)
        bench.start(1, 40)
        bench.hand_off(1)
        bench.turn()
        bench.start(2, 40)
        assert bench.said(Waiting) == [Waiting(2, 0)], "3 + 3 blocks would leave none to grow"
        bench.run()
        bench.hand_off(2)
        bench.run()
        bench.assert_at_rest()


class TestDrain:
    def test_refuses_what_waits_and_serves_grants_and_sequences(self) -> None:
        bench = DecodeBench(num_blocks=6)
        bench.start(1, 64)
        bench.start(2, 64)
        bench.core.handle(BeginDrain(10.0))
        bench.start(3, 10)
        assert [(m.handle, failure(m)) for m in bench.said(Refused) if isinstance(m, Refused)] == [
            (2, "Draining"),
            (3, "Draining"),
        ]
        bench.hand_off(1)
        assert Drained() not in bench.to_loop
        bench.run()
        assert bench.tokens(1) == bench.expected(1)
        assert bench.to_loop.count(Drained()) == 1
        bench.assert_at_rest()

    def test_at_its_limit_the_rest_ends_draining(self) -> None:
        bench = DecodeBench()
        bench.start(1, 40)
        bench.start(2, 40, max_tokens=100)
        bench.hand_off(2)
        bench.core.handle(BeginDrain(10.0))
        bench.turn()
        bench.clock.advance(11.0)
        bench.turn()
        assert failures(bench) == [(1, "Draining"), (2, "Draining")]
        assert Drained() not in bench.to_loop
        bench.retire(1)
        bench.turn()
        assert Drained() in bench.to_loop
        bench.assert_at_rest()


class TestReports:
    def test_load_counts_what_runs_and_what_waits(self) -> None:
        bench = DecodeBench(num_blocks=6)
        bench.start(1, 64)
        bench.start(2, 64)
        bench.clock.advance(1.0)
        bench.turn()
        loads = [m.message for m in bench.to_loop if isinstance(m, ToAll) and isinstance(m.message, Load)]
        assert (loads[-1].num_running, loads[-1].num_waiting, loads[-1].blocks.granted) == (1, 1, 5)
        bench.close_session()
        bench.retire(1)
        bench.assert_at_rest()
