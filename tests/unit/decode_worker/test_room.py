"""Who waits for blocks on a decode worker, who gets them, and from whom they are taken back."""

from __future__ import annotations

import pytest

from kv_transfer.messages import LeaseReleased
from pdserve.messages import (
    Abort,
    Phase,
    Progress,
    Refused,
    Waiting,
)
from pdserve.worker.messages import FromSession
from tests.unit.decode_worker.bench import DecodeBench, failure, failures


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


class TestNothingToDecode:
    """Whose first token, which the prefill worker samples, is its last: a prompt that is scored, for one."""

    def test_it_is_granted_at_once_and_holds_nothing(self) -> None:
        bench = DecodeBench(num_blocks=6, max_waiting=1, max_batch=2)
        bench.start(1, 64)
        bench.start(2, 64)
        bench.clock.advance(2.0)
        bench.turn()
        before = bench.engine.pool.counts()
        for handle in (3, 4, 5):
            bench.start(handle, 90, max_tokens=1)
            assert bench.expect(handle).block_ids == ()
        bench.start(6, 70, max_tokens=11, num_prompt=60)  # replayed with ten tokens of its own
        assert [granted.handle for granted in bench.granted()] == [1, 3, 4, 5, 6]
        assert bench.engine.pool.counts() == before
        bench.hand_off(1)
        bench.run()
        assert [granted.handle for granted in bench.granted()][-1] == 2, (
            "no place in the batch is taken either"
        )
        bench.close_session()
        for handle in (2, 3, 4, 5, 6):
            bench.retire(handle)
        bench.assert_at_rest()

    def test_it_is_not_revoked(self) -> None:
        bench = DecodeBench(num_blocks=8)
        bench.start(1, 60, max_tokens=40)
        bench.hand_off(1)
        bench.start(2, 40)
        bench.start(3, 40, max_tokens=1)
        while not bench.ended_leases():
            bench.turn()
        bench.retire(2)
        bench.run()
        assert failures(bench) == [(2, "Revoked")]
        bench.close_session()
        bench.retire(3)
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
