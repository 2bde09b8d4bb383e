"""How grants and sequences of a decode worker end, and what is freed when."""

from __future__ import annotations

import pytest

from kv_transfer.messages import EndLease, LeaseReleased
from pdserve.engine.fake_runner import FakeFaults
from pdserve.errors import KvCorrupt, StepFailed
from pdserve.messages import (
    Abort,
    DecodeStarted,
    Failed,
    Refused,
    SequenceFinished,
)
from pdserve.worker.messages import BeginDrain, Drained, FromSession, SessionOpened
from tests.unit.decode_worker.bench import DecodeBench, failure, failures


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
