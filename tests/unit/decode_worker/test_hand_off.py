"""How a decode worker takes in a sequence and runs it: by a hand-off, or by a prefill of its own."""

from __future__ import annotations

import pytest

from kv_transfer.messages import ExpectLease
from pdserve.engine.block_pool import BlockState
from pdserve.messages import (
    DecodeStarted,
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
from pdserve.worker.messages import FromSession, SessionOpened, ToAll, ToSession
from tests.unit.decode_worker.bench import P1, DecodeBench, failure, key, prompt


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
