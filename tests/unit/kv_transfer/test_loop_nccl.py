"""The double of NCCL notices whoever breaks NCCL's rules: else nothing that runs over it would mean anything."""

from __future__ import annotations

import heapq
import random
import threading
from collections.abc import Callable

import pytest

from kv_transfer.transports.nccl_port import RECEIVER_RANK, SENDER_RANK
from pdserve.errors import WorkerLost
from pdserve.kv_memory import ByteSpan, HostMemory
from tests.support.loop_nccl import LoopNccl, NcclFabric, NcclMisused
from tests.support.memories import StagedMemory

SPAN = ByteSpan(0, 100)


class _Bench:
    """Two devices, a communicator of both, and time that passes when it is told to."""

    def __init__(self, seed: int) -> None:
        self._now_s = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self.fabric = NcclFabric(schedule=self._schedule, delay=lambda: 1.0, random=random.Random(seed))
        self.sender, self.receiver = (
            LoopNccl(self.fabric, name, StagedMemory(HostMemory(1 << 12)), wake=lambda: None, max_comms=2)
            for name in "pd"
        )
        self.send_comm, self.receive_comm = self.join()

    def join(self) -> tuple[int, int]:
        unique_id = self.receiver.make_unique_id()
        comms = self.sender.init(unique_id, SENDER_RANK), self.receiver.init(unique_id, RECEIVER_RANK)
        self.run()
        return comms

    def _schedule(self, delay_s: float, call: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._due, (self._now_s + delay_s, self._count, call))

    def run(self) -> None:
        """Until nothing is under way."""
        while self._due:
            self._now_s, _count, call = heapq.heappop(self._due)
            call()

    def receive(self, *spans: ByteSpan) -> None:
        self.receiver.begin_group()
        for span in spans:
            self.receiver.receive(self.receive_comm, span)
        self.receiver.end_group(self.receive_comm)

    def send(self, *spans: ByteSpan) -> None:
        self.sender.begin_group()
        for span in spans:
            self.sender.send(self.send_comm, span)
        self.sender.end_group(self.send_comm)


@pytest.fixture(params=[1, 2, 3])
def bench(request: pytest.FixtureRequest) -> _Bench:
    return _Bench(request.param)


def test_a_group_moves_when_both_ends_have_it(bench: _Bench) -> None:
    bench.receive(SPAN)
    bench.run()
    event = bench.receiver.record(bench.receive_comm)
    assert not bench.receiver.is_over(event)
    bench.send(SPAN)
    bench.run()
    assert bench.receiver.is_over(event)


def _call_elsewhere(bench: _Bench) -> None:
    raised: list[BaseException] = []

    def call() -> None:
        try:
            bench.sender.is_settled(bench.send_comm)
        except NcclMisused as error:
            raised.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    raise raised[0]


def _unequal(bench: _Bench) -> None:
    bench.receive(SPAN, SPAN)
    bench.run()
    bench.send(SPAN)
    bench.run()


def _other_size(bench: _Bench) -> None:
    bench.receive(SPAN)
    bench.run()
    bench.send(ByteSpan(0, 99))
    bench.run()


def _send_first(bench: _Bench) -> None:
    bench.send(SPAN)
    bench.run()


def _two_receives(bench: _Bench) -> None:
    _comm, other = bench.join()
    bench.receive(SPAN)
    bench.run()
    bench.receive_comm = other
    bench.receive(SPAN)
    bench.run()


def _send_outside(bench: _Bench) -> None:
    bench.sender.send(bench.send_comm, SPAN)


def _group_in_group(bench: _Bench) -> None:
    bench.sender.begin_group()
    bench.sender.begin_group()


def _wrong_rank(bench: _Bench) -> None:
    bench.receiver.begin_group()
    bench.receiver.send(bench.receive_comm, SPAN)


def _too_large(bench: _Bench) -> None:
    bench.receive(*[SPAN] * 257)


def _after_revoke(bench: _Bench) -> None:
    bench.receiver.revoke(bench.receive_comm)
    bench.receive(SPAN)


def _abort_first(bench: _Bench) -> None:
    bench.receiver.abort(bench.receive_comm)


def _after_abort(bench: _Bench) -> None:
    bench.receiver.revoke(bench.receive_comm)
    bench.receiver.abort(bench.receive_comm)
    bench.receiver.is_settled(bench.receive_comm)


def _id_twice(bench: _Bench) -> None:
    unique_id = bench.receiver.make_unique_id()
    bench.receiver.init(unique_id, RECEIVER_RANK)
    bench.sender.init(unique_id, SENDER_RANK)
    bench.sender.init(unique_id, SENDER_RANK)


def _too_many(bench: _Bench) -> None:
    bench.join()
    bench.join()


@pytest.mark.parametrize(
    "misuse",
    [
        _call_elsewhere, _unequal, _other_size, _send_first, _two_receives, _send_outside, _group_in_group,
        _wrong_rank, _too_large, _after_revoke, _abort_first, _after_abort, _id_twice, _too_many,
    ],
    ids=lambda misuse: misuse.__name__.strip("_"),
)  # fmt: skip
def test_a_misuse_is_noticed(bench: _Bench, misuse: Callable[[_Bench], None]) -> None:
    with pytest.raises(NcclMisused):
        misuse(bench)


def test_an_event_that_is_recorded_too_early_is_noticed() -> None:
    """Only where the group hasn't settled at once, which it may."""
    for seed in range(20):
        bench = _Bench(seed)
        bench.receive(SPAN)
        if not bench.receiver.is_settled(bench.receive_comm):
            with pytest.raises(NcclMisused):
                bench.receiver.record(bench.receive_comm)
            return
    pytest.fail("every group settled at once")


def test_an_abort_waits_for_the_kernels_of_others(bench: _Bench) -> None:
    _comm, other = bench.join()
    bench.receive(SPAN)
    bench.run()
    bench.receiver.revoke(other)
    bench.receiver.abort(other)
    bench.run()
    assert not bench.receiver.is_aborted(other)
    bench.receiver.revoke(bench.receive_comm)
    bench.run()
    assert bench.receiver.is_aborted(other)


def test_of_a_process_that_died_the_other_hears_or_not() -> None:
    heard = set()
    for seed in range(20):
        bench = _Bench(seed)
        bench.receive(SPAN)
        bench.run()
        event = bench.receiver.record(bench.receive_comm)
        bench.sender.die()
        bench.run()
        try:
            bench.receiver.is_settled(bench.receive_comm)
            error = False
        except WorkerLost:
            error = True
        heard.add((error, bench.receiver.is_over(event)))
    assert heard == {(False, False), (True, False), (True, True)}
