"""What every session does, over gRPC and in memory alike (pdserve/session.py is the contract)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from pdserve import messages as m
from pdserve.block_messages import BlockCounts
from pdserve.errors import Draining, Failure, Incompatible, InvalidRequest, WorkerLost, to_failure
from pdserve.session import Session
from tests.contract.sessions.wires import OUTBOX_LIMIT, Wire, grpc_wire, memory_wire

LIMIT_S = 30.0  # generous: the machine is shared; nothing here waits for it to pass


@pytest.fixture(params=[grpc_wire, memory_wire], ids=["grpc", "memory"])
async def wire(request: pytest.FixtureRequest) -> AsyncIterator[Wire]:
    open_wire: Callable[[], AbstractAsyncContextManager[Wire]] = request.param
    async with asyncio.timeout(2 * LIMIT_S), open_wire() as wire:
        yield wire


async def receive_until_lost(session: Session[Any, Any]) -> tuple[list[Any], WorkerLost]:
    messages: list[Any] = []
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                messages.append(await session.receive())
            except WorkerLost as lost:
                return messages, lost


async def test_messages_arrive_in_order_both_ways(wire: Wire) -> None:
    for n in range(1, 301):
        wire.router.send(m.Abort(n))
        wire.worker.send(m.Waiting(n, n))
    assert [await wire.worker.receive() for _ in range(300)] == [m.Abort(n) for n in range(1, 301)]
    assert [await wire.router.receive() for _ in range(300)] == [m.Waiting(n, n) for n in range(1, 301)]


async def test_a_message_sent_later_still_arrives(wire: Wire) -> None:
    for n in range(1, 4):
        wire.worker.send(m.Credits(n))
        assert await wire.router.receive() == m.Credits(n)
        wire.router.send(m.Demand(n))
        assert await wire.worker.receive() == m.Demand(n)


async def test_tokens_are_merged_but_never_lost_or_reordered(wire: Wire) -> None:
    """Nobody reads at first: the steps pile up, join, and still carry every token once, in order."""
    expected: dict[int, list[int]] = {1: [], 2: []}
    for step in range(600):
        sequences = tuple(m.StepTokens(handle, step, (step * 10 + handle,)) for handle in (1, 2))
        wire.worker.send(m.Step(sequences))
        for handle in expected:
            expected[handle].append(step * 10 + handle)
    wire.worker.send(m.Failed(9, _failure()))
    got: dict[int, list[int]] = {1: [], 2: []}
    num_steps = 0
    while not isinstance(message := await wire.router.receive(), m.Failed):
        assert isinstance(message, m.Step)
        num_steps += 1
        for each in message.sequences:
            assert each.first_position == len(got[each.handle])
            got[each.handle] += each.token_ids
    assert got == expected
    assert num_steps < 600


async def test_the_end_of_a_sequence_stays_behind_its_tokens(wire: Wire) -> None:
    for n in range(1, 50):
        wire.worker.send(m.Step((m.StepTokens(n, 0, (5, 6)),)))
        wire.worker.send(m.Failed(n, _failure()))
        wire.worker.send(m.Step((m.StepTokens(n + 1000, 0, (7,)),)))
    seen: list[int] = []
    failed: list[int] = []
    while len(failed) < 49:
        message = await wire.router.receive()
        if isinstance(message, m.Step):
            seen += [each.handle for each in message.sequences]
        elif isinstance(message, m.Failed):
            assert message.handle in seen
            failed.append(message.handle)
    assert failed == list(range(1, 50))


async def test_what_was_sent_before_a_close_arrives_even_if_it_is_read_later(wire: Wire) -> None:
    """A worker's last words, its drain over: more than the other side takes in at once."""
    for n in range(1, 501):
        wire.worker.send(m.Waiting(n, n))
    wire.worker.close("drained")
    messages, _ = await receive_until_lost(wire.router)
    assert messages == [m.Waiting(n, n) for n in range(1, 501)]


async def test_load_keeps_the_newest_only(wire: Wire) -> None:
    for n in range(OUTBOX_LIMIT * 2):
        wire.worker.send(_load(n))
    wire.worker.send(m.Credits(1))
    loads: list[m.Load] = []
    while not isinstance(message := await wire.router.receive(), m.Credits):
        assert isinstance(message, m.Load)
        loads.append(message)
    assert loads[-1] == _load(OUTBOX_LIMIT * 2 - 1)
    assert len(loads) < OUTBOX_LIMIT


async def test_a_slow_consumer_is_closed(wire: Wire) -> None:
    """The router never reads: first its inbox, then the connection, then the outbox is full, then it ends."""
    filler = "x" * 10_000  # so that the connection's own buffers are full soon
    for n in range(1, 100 * OUTBOX_LIMIT):
        wire.worker.send(m.TokenizerFile(filler, b"", False))
        if n % 100 == 0:
            await asyncio.sleep(0)
        if wire.worker.ended:  # type: ignore[attr-defined]
            break
    else:
        pytest.fail("the outbox has no bound")
    with pytest.raises(WorkerLost, match="slow consumer"):
        await wire.worker.receive()
    messages, _ = await receive_until_lost(wire.router)
    assert len(messages) < n


async def test_closed_by_the_worker(wire: Wire) -> None:
    wire.worker.send(m.Credits(5))
    wire.worker.close("drained")
    wire.worker.close("again")
    wire.worker.send(m.Credits(6))
    with pytest.raises(WorkerLost, match="drained"):
        await wire.worker.receive()
    messages, _ = await receive_until_lost(wire.router)
    assert messages == [m.Credits(5)]
    wire.router.send(m.Drain())  # swallowed
    with pytest.raises(WorkerLost):
        await wire.router.receive()


async def test_closed_by_the_router_after_its_last_word(wire: Wire) -> None:
    wire.router.send(m.Superseded())
    wire.router.close("a later epoch joined")
    with pytest.raises(WorkerLost, match="later epoch"):
        await wire.router.receive()
    messages, lost = await receive_until_lost(wire.worker)
    assert messages == [m.Superseded()]
    assert "a later epoch joined" in str(lost)


async def test_a_misfit_learns_why_after_the_router_s_last_word(wire: Wire) -> None:
    wire.router.send(m.Demand(1))
    wire.router.refuse(Incompatible("worker's dtype differs", field="dtype", theirs="bf16", ours="fp32"))
    wire.router.close("again")
    assert await wire.worker.receive() == m.Demand(1)
    for _ in range(2):
        with pytest.raises(Incompatible, match=r"dtype differs.*field=dtype.*theirs=bf16.*ours=fp32"):
            async with asyncio.timeout(LIMIT_S):
                await wire.worker.receive()
    with pytest.raises(WorkerLost, match="dtype differs"):
        await wire.router.receive()


async def test_any_other_refusal_is_the_end_of_a_session_with_its_reason(wire: Wire) -> None:
    wire.router.refuse(InvalidRequest("the first message must be Hello", got="Load"))
    _, lost = await receive_until_lost(wire.worker)
    assert "must be Hello" in str(lost)


async def test_a_silent_wire_ends_the_session_on_both_sides(wire: Wire) -> None:
    wire.worker.send(m.Credits(1))
    assert await wire.router.receive() == m.Credits(1)
    wire.cut()
    wire.worker.send(m.Credits(2))
    assert (await receive_until_lost(wire.router))[0] == []
    assert (await receive_until_lost(wire.worker))[0] == []


async def test_the_end_wakes_a_waiting_reader(wire: Wire) -> None:
    waiting = asyncio.create_task(receive_until_lost(wire.worker))
    wire.router.send(m.Drain())
    wire.router.close("done")
    assert (await waiting)[0] == [m.Drain()]


def _failure() -> Failure:
    return to_failure(Draining("going"))


def _load(n: int) -> m.Load:
    return m.Load(
        blocks=BlockCounts(1, 2, 3, 4, 5),
        num_running=n,
        num_waiting=0,
        num_queued_tokens=0,
        num_queued_short_tokens=0,
        chunk_tokens=512,
        num_cache_hit_tokens=0,
        num_cache_query_tokens=0,
        prefill_tokens_per_s=0.0,
        step_s=0.0,
        slowest_step_s=0.0,
        draining=False,
    )
