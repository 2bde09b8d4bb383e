"""The driver under virtual time: what is sent when, what is noted, and how a run ends early."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

import pytest

from pdserve.bench.drive import STOPPED, LoadDriver, RequestRecord, Run
from pdserve.bench.plan import Planned
from pdserve.errors import Overloaded
from pdserve.request import Event, GenerateRequest, Started, Tokens
from tests.support.virtual_clock import VirtualClock
from tests.support.virtual_loop import run_virtual
from tests.unit.bench.measured import finished


class Scripted:
    """A client that needs second_s for each of three tokens; requests of one token are refused."""

    def __init__(self, second_s: float = 1.0) -> None:
        self.second_s = second_s
        self.num_running = self.most_running = self.num_left = 0

    async def generate(
        self, request: GenerateRequest, *, deadline_s: float | None = None
    ) -> AsyncGenerator[Event, None]:
        assert isinstance(request.input, tuple)
        if len(request.input) == 1:
            raise Overloaded("too much", retry_after_s=1.0)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            yield Started(
                request_id="r",
                seed=1,
                num_prompt_tokens=2,
                num_cached_tokens=1,
                prompt_token_ids=(),
                model="m",
            )
            for index in range(3):
                await asyncio.sleep(self.second_s)
                yield Tokens(choice=0, first_index=index, token_ids=(5,), text="x")
            yield finished(3)
        finally:
            self.num_running -= 1
            self.num_left += 1


def planned(*at_s: float, num_prompt: int = 2) -> list[Planned]:
    return [Planned(each, GenerateRequest(input=(1,) * num_prompt)) for each in at_s]


def drive(
    client: Scripted,
    plan: list[Planned],
    *,
    concurrency: int | None = None,
    stop_s: float | None = None,
    told: Callable[[RequestRecord], None] = lambda outcome: None,
) -> Run:
    clock = VirtualClock()

    async def main() -> Run:
        stop = asyncio.Event()
        if stop_s is not None:
            asyncio.get_running_loop().call_later(stop_s, stop.set)
        return await LoadDriver(client, clock, concurrency=concurrency, told=told).run(plan, stop)

    return run_virtual(main(), clock)


def test_requests_go_out_at_their_moments_whatever_runs() -> None:
    client = Scripted()
    run = drive(client, planned(0.0, 0.5, 0.5, 10.0))
    assert [each.sent_s for each in run.outcomes] == [0.0, 0.5, 0.5, 10.0]
    assert [each.planned_s for each in run.outcomes] == [0.0, 0.5, 0.5, 10.0]
    assert client.most_running == 3
    assert run.seconds == 13.0 and not run.was_stopped


def test_a_request_is_noted_as_its_client_saw_it() -> None:
    (each,) = drive(Scripted(), planned(2.0)).outcomes
    assert each.is_ok and each.token_s == [3.0, 4.0, 5.0]
    assert (each.ttft_s, each.gaps_s, each.tpot_s) == (1.0, [1.0, 1.0], 1.0)
    assert (each.num_tokens, each.num_prompt, each.num_cached, each.num_attempts) == (3, 2, 4, 2)
    assert each.timings is not None and each.timings.ttft_ms == 5.0
    assert each.ended_s == 5.0


def test_a_fixed_number_is_kept_going() -> None:
    client = Scripted()
    run = drive(client, planned(*[0.0] * 7), concurrency=3)
    assert client.most_running == 3
    assert [each.sent_s for each in run.outcomes] == [0.0, 0.0, 0.0, 3.0, 3.0, 3.0, 6.0]
    assert all(each.sent_s == each.planned_s for each in run.outcomes)
    assert run.seconds == 9.0


def test_fewer_requests_than_may_run_at_a_time() -> None:
    assert len(drive(Scripted(), planned(0.0), concurrency=64).outcomes) == 1


def test_a_refusal_is_an_outcome_and_the_run_goes_on() -> None:
    run = drive(Scripted(), planned(0.0, num_prompt=1) + planned(1.0))
    refused, served = run.outcomes
    assert (refused.code, refused.token_s, refused.ttft_s) == ("RESOURCE_EXHAUSTED", [], None)
    assert "too much" in refused.error and served.is_ok


def test_each_one_that_ends_is_told() -> None:
    told: list[RequestRecord] = []
    run = drive(Scripted(), planned(1.0, 0.0), told=told.append)
    assert sorted(each.sent_s for each in told) == sorted(each.sent_s for each in run.outcomes)


def test_a_stopped_run_sends_nothing_more_and_ends_what_runs() -> None:
    client = Scripted()
    run = drive(client, planned(0.0, 1.0, 9.0), stop_s=3.5)
    assert run.was_stopped and run.seconds == 3.5
    assert [each.code for each in run.outcomes] == ["OK", STOPPED]
    assert client.num_running == 0 and client.num_left == 2


def test_an_error_that_is_nobodys_answer_ends_the_run() -> None:
    class Broken(Scripted):
        async def generate(
            self, request: GenerateRequest, *, deadline_s: float | None = None
        ) -> AsyncGenerator[Event, None]:
            yield finished(3 // len(request.user))

    with pytest.raises(ExceptionGroup) as raised:
        drive(Broken(), planned(0.0))
    assert raised.value.subgroup(ZeroDivisionError) is not None
