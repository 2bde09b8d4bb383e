"""Timings, signs of life, bookings, identity: the router's small parts by themselves."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pdserve.errors import Incompatible, InvalidRequest, UnknownModel
from pdserve.messages import Role
from pdserve.percentile import percentile
from pdserve.request import GenerateRequest, Limits, Resume, ResumeChoice
from pdserve.sampling import SamplingParams
from router.accounting import Accounting, Credit
from router.identity import ModelIdentity, check_hello
from router.liveness import Liveness
from router.progress_timer import ProgressTimer
from router.timings import AttemptTimes, ChoiceTimes
from router.validation import check_model, check_prompt, resolve_max_tokens
from tests.support.virtual_loop import VirtualLoop
from tests.unit.router.scripted import hello, load, virtual


def test_percentiles_are_nearest_ranks() -> None:
    values = [float(n) for n in range(1, 101)]
    assert percentile(values, 50) == 50 and percentile(values, 99) == 99
    assert percentile([7.0], 99) == 7 and percentile([], 50) == 0


def test_gaps_run_over_attempts_and_the_first_token_keeps_its_attempt() -> None:
    times = ChoiceTimes(100.0)
    first, second = AttemptTimes(credit_held_s=100.5), AttemptTimes(credit_held_s=103.0)
    assert list(times.on_tokens(1, 101.0, first)) == []
    assert list(times.on_tokens(2, 101.5, first)) == [0.5, 0.0]
    assert list(times.on_tokens(1, 104.5, second)) == [3.0]
    times.on_first_written(101.25)
    times.on_first_written(200.0)
    found = times.timings(105.0)
    assert found.ttft_ms == pytest.approx(1250) and found.queue_ms == pytest.approx(500)
    assert found.relay_ms == pytest.approx(250) and found.rest_ms == pytest.approx(500)
    assert found.first_gap_ms == pytest.approx(500) and found.itl_p99_ms == pytest.approx(3000)
    assert found.total_ms == pytest.approx(5000)


def test_an_assignment_counts_until_a_report_that_comes_after_its_answer() -> None:
    accounting = Accounting()
    accounting.assign(1, 100, 7, 0.0)
    accounting.report(load(num_queued_tokens=10), 0.0)  # may have been written before the worker read it
    assert accounting.num_queued_tokens == 110 and accounting.num_sequences == 1
    accounting.answered(1)
    assert accounting.num_queued_tokens == 110
    accounting.report(load(num_queued_tokens=110, num_running=1), 0.0)
    assert accounting.num_queued_tokens == 110 and accounting.num_sequences == 1
    assert accounting.num_free_blocks(1000) == 1000
    accounting.assign(2, 5, 3, 0.0)
    assert accounting.num_free_blocks(1000) == 997
    accounting.drop(2)
    assert accounting.num_free_blocks(1000) == 1000
    accounting.withdraw(1)  # what the last report says of it
    assert accounting.num_queued_tokens == 10
    accounting.report(load(num_queued_tokens=10), 0.0)
    assert accounting.num_queued_tokens == 10


def test_what_a_prompt_waits_for_depends_on_whether_one_chunk_does_it() -> None:
    """A worker halves its steps between those that one chunk does and the others."""
    accounting = Accounting()
    assert accounting.num_tokens_before(10) == 0
    accounting.report(load(num_queued_tokens=10_000, num_queued_short_tokens=300, chunk_tokens=512), 0.0)
    assert accounting.num_tokens_before(513) == 10_000
    assert accounting.num_tokens_before(10) == 300 + (300 + 10 + 512)
    accounting.report(load(num_queued_tokens=340, num_queued_short_tokens=300, chunk_tokens=512), 0.0)
    assert accounting.num_tokens_before(10) == 340, "no more than there is"
    accounting.assign(1, 2_000, 0, 0.0)
    accounting.assign(2, 20, 0, 0.0)
    assert accounting.num_tokens_before(513) == 340 + 2_020
    assert accounting.num_tokens_before(10) == 320 + (320 + 10 + 512)
    for handle in (1, 2):
        accounting.answered(handle)
    accounting.report(load(num_queued_tokens=2_360, num_queued_short_tokens=320, chunk_tokens=512), 0.0)
    accounting.withdraw(2)
    assert accounting.num_tokens_before(10) == 300 + (300 + 10 + 512)
    accounting.withdraw(1)
    assert accounting.num_tokens_before(10) == 340


def test_recent_assignments_fade() -> None:
    accounting = Accounting()
    for _ in range(4):
        accounting.assign(1, 0, 0, 50.0)
    assert accounting.recent(50.0) == pytest.approx(4) and accounting.recent(100.0) < 0.1


def test_held_credit_is_subtracted_until_the_worker_counts_it() -> None:
    credit = Credit()
    credit.balance = 10
    credit.hold(1, 30)
    assert credit.available == -20
    credit.balance = -20
    credit.release(1)
    assert credit.available == -20


def test_a_hang_is_work_in_hand_without_a_step() -> None:
    life = Liveness(0.0, silent_s=4.0, late_s=0.75)
    life.heartbeat(5, True, 0.0)
    life.heard(5.0)
    assert life.why_dead(5.0) == ""
    life.heard(5.1)
    assert "hangs" in life.why_dead(5.1)
    life.heartbeat(5, False, 5.2)
    assert life.why_dead(6.0) == ""
    assert "no message" in life.why_dead(9.3)


def test_a_process_that_hung_is_suspect_until_its_counter_moves() -> None:
    life = Liveness(0.0, 4.0, 0.75, stuck_at_steps=5)
    life.heartbeat(5, True, 0.1)
    assert life.suspect
    life.heartbeat(6, True, 0.2)
    assert not life.suspect


@pytest.mark.parametrize("field", ["model", "weights_fingerprint", "tokenizer_fingerprint", "vocab_size"])
def test_a_worker_of_another_model_is_refused_naming_the_field_and_both_values(field: str) -> None:
    ours = hello("d0", Role.DECODE)
    other: dict[str, Any] = {field: 7 if field == "vocab_size" else "x"}
    theirs = hello("d1", Role.DECODE, **other)
    ModelIdentity.of(ours).check(ours)
    with pytest.raises(Incompatible) as refused:
        ModelIdentity.of(ours).check(theirs)
    assert refused.value.fields["field"] == field
    assert refused.value.fields["theirs"] == str(getattr(theirs, field))
    assert refused.value.fields["ours"] == str(getattr(ours, field))


def test_a_hello_that_nobody_could_work_with_is_refused() -> None:
    with pytest.raises(Incompatible, match="block_size"):
        check_hello(hello("d0", Role.DECODE, block_size=0))


def test_max_tokens_is_what_is_left_of_the_window_or_refused_beyond_it() -> None:
    def resolve(asked: int | None, prompt: int) -> int:
        request = GenerateRequest(input="x", sampling=SamplingParams(max_tokens=asked))
        return resolve_max_tokens(request, prompt, 100)

    assert resolve(None, 99) == 1 and resolve(None, 1) == 99 and resolve(10, 90) == 10
    for asked, prompt in ((None, 100), (11, 90)):
        with pytest.raises(InvalidRequest) as refused:
            resolve(asked, prompt)
        assert refused.value.fields["limit"] == 100 and refused.value.fields["value"] == 101


def test_min_tokens_must_fit_what_is_left_of_the_window() -> None:
    def resolve(min_tokens: int) -> int:
        request = GenerateRequest(input="x", sampling=SamplingParams(min_tokens=min_tokens))
        return resolve_max_tokens(request, 90, 100)

    assert resolve(10) == 10
    with pytest.raises(InvalidRequest, match=r"min_tokens .*limit=10, value=11"):
        resolve(11)


def test_more_resumed_tokens_than_the_request_may_have_are_refused() -> None:
    request = GenerateRequest(input="x", resume=Resume(1, (ResumeChoice((1,) * 51),)), seed=1)
    with pytest.raises(InvalidRequest, match="resume"):
        resolve_max_tokens(request, 50, 100)


def test_ids_outside_the_vocabulary_and_other_models_are_refused() -> None:
    limits = Limits(vocab_size=260)
    with pytest.raises(InvalidRequest, match="stop_token_ids"):
        check_prompt(GenerateRequest(input="x", sampling=SamplingParams(stop_token_ids=(260,))), (1,), limits)
    with pytest.raises(InvalidRequest, match="the prompt holds an id outside"):
        check_prompt(GenerateRequest(input="x"), (260,), limits)
    with pytest.raises(InvalidRequest, match="no tokens"):
        check_prompt(GenerateRequest(input="x"), (), limits)
    with pytest.raises(UnknownModel, match="other"):
        check_model("other", "m")
    check_model("", "m")


@virtual
async def test_a_time_out_of_a_process_that_stood_still_waits_for_what_lies_unread() -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    clock, expired = loop.clock, []

    async def stand_still(for_s: float) -> None:
        clock.advance(for_s)
        await asyncio.sleep(0.001)

    timer = ProgressTimer(clock, lambda: expired.append(clock.now_s()))
    timer.restart(1.0)
    await stand_still(1.05)
    assert len(expired) == 1
    timer.restart(1.0)
    await stand_still(1.6)  # 0.6 s late: as long again, once
    assert len(expired) == 1 and timer.active
    await stand_still(0.65)
    assert len(expired) == 2
    timer.restart(1.0)
    await stand_still(2.0)
    timer.restart(1.0)  # the news was there
    await stand_still(0.9)
    assert len(expired) == 2
    await stand_still(5.0)
    await stand_still(1.0)
    assert len(expired) == 3, "at most GRACE_S, and once"
