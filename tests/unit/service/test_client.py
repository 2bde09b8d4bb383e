"""The clients: what they yield, what they raise, and how they go on when a router is lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator

import pytest
from structlog.testing import capture_logs

from pdserve import errors
from pdserve.client import AsyncClient, Client, RouterLost
from pdserve.completion import ResumableGeneration
from pdserve.request import (
    Chat,
    ChatMessage,
    Event,
    Finished,
    GenerateRequest,
    Resume,
    ResumeChoice,
    Started,
    Tokens,
)
from pdserve.sampling import FinishReason, SamplingParams
from pdserve.service.rpc_errors import ServerLost
from pdserve.service.targets import Targets
from tests.unit.service.doors import Answer, Door, count_to, finished, open_door, started, token


async def events_of(client: AsyncClient, request: GenerateRequest | str = "x") -> list[Event]:
    async with asyncio.timeout(30):
        return [event async for event in client.generate(request)]


def indices(events: list[Event]) -> list[int]:
    return [event.first_index for event in events if isinstance(event, Tokens)]


async def test_a_generation_as_events_and_collected() -> None:
    async with open_door(Door(count_to)) as (address, _), AsyncClient(address) as client:
        events = await events_of(client)
        assert isinstance(events[0], Started)
        assert isinstance(events[-1], Finished)
        assert indices(events) == list(range(6))
        whole = await client.generate_text((5, 6), deadline_s=20)
    assert whole.text == "0 1 2 3 4 5 "
    assert whole.token_ids == (0, 1, 2, 3, 4, 5)
    assert whole.started.seed == 77
    assert whole.finished.reason is FinishReason.LENGTH


async def test_the_request_arrives_whole() -> None:
    door = Door(count_to)
    request = GenerateRequest(
        input=Chat((ChatMessage("user", "hi"),)),
        request_id="r1",
        sampling=SamplingParams(temperature=0.5, max_tokens=6, stop=("x",)),
        seed=3,
        priority=2,
    )
    async with open_door(door) as (address, _), AsyncClient(address) as client:
        async for _ in client.generate(request, deadline_s=1000):
            pass
    assert door.requests == [request]
    assert 900 < (door.times_remaining[0] or 0) < 1100  # gRPC rounds up what it sends


async def test_a_request_that_breaks_a_rule_never_leaves_the_client() -> None:
    async with AsyncClient("127.0.0.1:9") as client:  # nobody is there
        with pytest.raises(
            errors.InvalidRequest, match=r"top_p out of range \(limit=above 0, at most 1, value=7\)"
        ):
            await client.generate_text(GenerateRequest(input="x", sampling=SamplingParams(top_p=7)))


async def test_the_other_calls() -> None:
    async with open_door(Door(count_to)) as (address, _), AsyncClient(address) as client:
        assert await client.tokenize("ab") == (97, 98)
        assert await client.tokenize(Chat((ChatMessage("user", "c"),))) == (99,)
        assert await client.detokenize([97, 98]) == "ab"
        assert await client.token_bytes([0xC3, 0xA9]) == (b"\xc3", b"\xa9")
        assert (await client.model()).window_tokens == 128
        status = await client.status()
        await client.abort("r")
    assert status.workers[0].blocks.quarantined == 5
    assert status.pairs[0].transport == "stream"
    assert status.queue.limit == 9


async def test_errors_of_the_router_are_raised_as_they_are() -> None:
    async def answer(request: GenerateRequest) -> AsyncGenerator[Event, None]:
        if request.input == "x":
            raise errors.Overloaded("the queue is full", retry_after_s=2.5)
        yield token(0)

    door = Door(answer, errors.UnknownRequest("no such request", request_id="r"))
    async with open_door(door) as (address, _), AsyncClient(address) as client:
        with pytest.raises(errors.Overloaded) as caught:
            await events_of(client)
        assert caught.value.retry_after_s == 2.5
        with pytest.raises(errors.UnknownRequest, match="no such request"):
            await client.abort("r")


async def test_a_deadline_ends_the_stream() -> None:
    async def answer(request: GenerateRequest) -> AsyncGenerator[Event, None]:
        yield started(request)
        await asyncio.Event().wait()

    async with open_door(Door(answer)) as (address, _), AsyncClient(address) as client:
        with pytest.raises(errors.DeadlineExceeded):
            async for _ in client.generate("x", deadline_s=0.3):
                pass
        with pytest.raises(errors.DeadlineExceeded):
            async for _ in client.generate("x", deadline_s=0.0):
                pass


async def test_leaving_the_iteration_cancels_the_request() -> None:
    async def answer(request: GenerateRequest) -> AsyncGenerator[Event, None]:
        yield started(request)
        await asyncio.Event().wait()

    door = Door(answer)
    async with open_door(door) as (address, _), AsyncClient(address) as client:
        events = client.generate("x")
        await anext(events)
        await events.aclose()
        async with asyncio.timeout(20):
            await door.cancelled.wait()


def stuck_after(num_tokens: int, stuck: asyncio.Event) -> Answer:
    async def answer(request: GenerateRequest) -> AsyncGenerator[Event, None]:
        yield started(request)
        held = len(request.resume.choices[0].token_ids) if request.resume is not None else 0
        for index in range(held, held + num_tokens):
            yield token(index)
        stuck.set()
        await asyncio.Event().wait()

    return answer


async def test_a_lost_router_is_replaced_without_gap_or_repeat() -> None:
    stuck = asyncio.Event()
    first, second = Door(stuck_after(3, stuck)), Door(count_to)
    async with open_door(first) as (a, server), open_door(second) as (b, _), AsyncClient([a, b]) as client:
        generating = asyncio.create_task(events_of(client, GenerateRequest(input="x", request_id="r1")))
        await stuck.wait()
        await server.stop(None)
        events = await generating
        assert indices(events) == list(range(6))
        assert sum(isinstance(event, Started) for event in events) == 1
        assert second.requests[0].resume == Resume(77, (ResumeChoice((0, 1, 2)),))
        assert second.requests[0].request_id == "r1"
        assert indices(await events_of(client)) == list(range(6))  # and stays there
    assert len(first.requests) == 1


@pytest.mark.parametrize("num_streams", [2, 3, 8])
async def test_streams_that_lose_a_router_together_all_go_on_at_the_other(num_streams: int) -> None:
    """Each of them says that it is gone; the second one's word must not lead back to it."""
    begun = [asyncio.Event() for _ in range(num_streams)]
    waiting = iter(begun)

    async def answer(request: GenerateRequest) -> AsyncGenerator[Event, None]:
        async for event in stuck_after(3, next(waiting))(request):
            yield event

    first, second = Door(answer), Door(count_to)
    async with open_door(first) as (a, server), open_door(second) as (b, _), AsyncClient([a, b]) as client:
        generating = [asyncio.create_task(events_of(client)) for _ in begun]
        async with asyncio.timeout(30):
            for each in begun:
                await each.wait()
        await server.stop(None)
        assert [indices(await each) for each in generating] == [list(range(6))] * num_streams
    assert len(second.requests) == num_streams


async def test_calls_that_lose_a_router_together_all_go_on_at_the_other() -> None:
    targets = Targets(["a", "b"], keepalive_s=1.0)
    both_asked = asyncio.Barrier(2)

    async def call(target: str) -> str:
        if target == "a":
            await both_asked.wait()
            raise ServerLost("gone", target=target)
        return target

    async with asyncio.timeout(30):
        assert list(await asyncio.gather(targets.ask(call), targets.ask(call))) == ["b", "b"]


async def test_a_draining_router_is_left_too() -> None:
    async def answer(request: GenerateRequest) -> AsyncGenerator[Event, None]:
        yield started(request)
        yield token(0)
        raise errors.Draining("the router is going")

    second = Door(count_to)
    async with (
        open_door(Door(answer)) as (a, _),
        open_door(second) as (b, _),
        AsyncClient([a, b]) as client,
    ):
        assert indices(await events_of(client)) == list(range(6))
    assert second.requests[0].resume == Resume(77, (ResumeChoice((0,)),))


async def test_a_router_that_never_was_is_skipped() -> None:
    async with open_door(Door(count_to)) as (gone, _):
        pass
    async with open_door(Door(count_to)) as (address, _), AsyncClient([gone, address]) as client:
        assert indices(await events_of(client)) == list(range(6))
    async with open_door(Door(count_to)) as (address, _), AsyncClient([gone, address]) as client:
        assert (await client.model()).model == "m"


async def test_all_lost_says_what_can_be_resumed() -> None:
    stuck = asyncio.Event()
    async with open_door(Door(stuck_after(2, stuck))) as (address, server), AsyncClient(address) as client:
        generating = asyncio.create_task(events_of(client))
        await stuck.wait()
        await server.stop(None)
        with pytest.raises(RouterLost) as caught:
            await generating
    assert caught.value.resume == Resume(77, (ResumeChoice((0, 1)),))
    assert caught.value.fields["target"] == address


async def test_a_stream_that_ends_well_without_its_last_message_is_a_bug() -> None:
    async def answer(request: GenerateRequest) -> AsyncGenerator[Event, None]:
        yield started(request)

    async with open_door(Door(answer)) as (address, _), AsyncClient(address) as client:
        with pytest.raises(errors.InvariantViolated, match="without its last message"):
            await events_of(client)


def test_held_choices_keep_their_ends() -> None:
    generation = ResumableGeneration(GenerateRequest(input="x", n=2))
    request = GenerateRequest(input="x")
    assert generation.resume() is None
    for event in (started(request), token(0), token(0, choice=1), finished(1, choice=1)):
        assert generation.take(event) == [event]
    assert generation.resume() == Resume(77, (ResumeChoice((0,)), ResumeChoice((0,), FinishReason.LENGTH)))
    assert generation.take(started(request)) == []
    assert generation.take(finished(1, choice=1)) == []
    assert not generation.finished
    generation.take(finished(1))
    assert generation.finished


def test_a_gap_is_a_bug() -> None:
    generation = ResumableGeneration(GenerateRequest(input="x"))
    generation.take(token(0))
    with pytest.raises(errors.InvariantViolated, match="missing or came twice"):
        generation.take(token(2))


def test_a_client_needs_a_target() -> None:
    with pytest.raises(ValueError, match="at least one target"):
        AsyncClient([])


@pytest.fixture
def served() -> Iterator[tuple[str, Door]]:
    """A door on a loop of its own thread, for the client without a loop."""
    opened = threading.Event()
    box: list[tuple[str, Door, asyncio.Event]] = []

    async def serve() -> None:
        door, over = Door(count_to, errors.UnknownRequest("no such request")), asyncio.Event()
        async with open_door(door) as (address, _):
            box.append((address, door, over))
            opened.set()
            await over.wait()

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert opened.wait(30)
    address, door, over = box[0]
    yield address, door
    loop.call_soon_threadsafe(over.set)
    thread.join()
    loop.close()


def test_the_client_without_a_loop(served: tuple[str, Door]) -> None:
    address, door = served
    with Client(address) as client:
        events = list(client.generate("x"))
        assert indices(events) == list(range(6))
        assert client.generate_text("x", deadline_s=30).text == "0 1 2 3 4 5 "
        assert client.tokenize("ab") == (97, 98)
        assert client.detokenize([97]) == "a"
        assert client.model().vocab_size == 256
        assert client.status().router_id == "r0"
        with pytest.raises(errors.UnknownRequest):
            client.abort("r")
        for event in client.generate("x"):
            assert isinstance(event, Started)
            break
        client.close()
    assert len(door.requests) == 3


async def test_a_router_without_shared_calls_is_asked_call_by_call_and_not_for_one_again() -> None:
    door = Door(count_to)
    async with open_door(door) as (address, _), AsyncClient(address, shares_calls=True) as client:
        with capture_logs() as told:
            for _ in range(3):
                assert indices(await events_of(client)) == list(range(6))
    assert len(door.requests) == 3
    assert door.num_shared_calls == 1
    assert [each["event"] for each in told] == ["client.asks_call_by_call"]


async def test_a_client_that_shares_calls_is_told_that_nobody_is_there() -> None:
    async with AsyncClient("127.0.0.1:9", shares_calls=True) as client:
        with pytest.raises(RouterLost):
            await events_of(client)
