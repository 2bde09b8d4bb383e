"""What a prefill worker answers and offers while it computes one prompt."""

from __future__ import annotations

import pytest

from kv_transfer.messages import CommitLease, OpenLease, WithdrawLease
from pdserve.engine import fake_rule
from pdserve.errors import Revoked, WorkerLost
from pdserve.ids import Epoch, WorkerRef
from pdserve.messages import (
    Failed,
    FirstToken,
    Load,
    Phase,
    Progress,
    Refused,
    StartDecode,
)
from pdserve.worker.messages import (
    CacheChanged,
    CoreCounts,
    EngineBeat,
    FromSession,
    LinkChanged,
    ToAll,
)
from tests.unit.prefill_worker.bench import D1, D2, PrefillBench, failure, key, prompt


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
        assert bench.offers(1) == []
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
        assert counts[-1].ignored == (("StartPrefill", 1),)
        bench.close(1)


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
