"""The router's spans of a request that has ended, from the moments that its choices and attempts hold.

    request ──┬─ queue ─┬─ attempt ──┬─ reserve   (below it the decode worker's own: wait_for_blocks, transfer, decode)
              │         │            └─ prefill   (below it the prefill worker's own: queue, prefill, hand_off)
              └─ relay  └─ queue, attempt, … of a replay, which links to the attempt before it

queue, reserve, prefill and relay of the attempt that gave the first token add up to the TTFT.
Names and attributes gen_ai.*: OpenTelemetry's conventions for generative AI.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pdserve.errors import PdserveError
from pdserve.request import Chat
from pdserve.sampling import FinishReason
from pdserve.tracing import Attribute, SpanEvent, SpanKind, Trace, TraceSpan
from router.asked import Asked
from router.attempt import Attempt
from router.choice_run import ChoiceRun

PROVIDER = "pdserve"


def request_spans(
    asked: Asked,
    model: str,
    num_prompt_tokens: int,
    runs: Sequence[ChoiceRun],
    error: PdserveError | None,
    now_s: float,
) -> list[TraceSpan]:
    """Of one that is sampled. error: what it ended with."""
    above, place = asked.above, asked.place
    assert above is not None and place is not None, "only a sampled request has spans"
    name = f"{_operation(asked)} {model}" if model else _operation(asked)
    spans = [
        above.span(
            name,
            asked.received_s,
            now_s,
            place=place,
            kind=SpanKind.SERVER,
            attributes=_about_request(asked, model, num_prompt_tokens, runs, error),
            error=_words(error),
        )
    ]
    for run in runs:
        spans += _about_choice(asked, place, run, error, now_s)
    return spans


def _about_choice(
    asked: Asked, place: Trace, run: ChoiceRun, error: PdserveError | None, now_s: float
) -> Iterator[TraceSpan]:
    choice, waits_since_s, before = run.choice, asked.received_s, None
    for attempt in run.traced:
        yield place.span("queue", waits_since_s, attempt.times.credit_held_s, attributes=_of_choice(run))
        yield from _about_attempt(run, attempt, place, before, now_s)
        before, waits_since_s = attempt, attempt.times.ended_s or now_s
    if choice.reason is None and error is not None and not run.is_placed:
        yield place.span("queue", waits_since_s, now_s, attributes=_of_choice(run), error=_words(error))
    times = choice.times
    if times.first_read_s is not None and times.first_written_s is not None:
        yield place.span("relay", times.first_read_s, times.first_written_s, attributes=_of_choice(run))


def _about_attempt(
    run: ChoiceRun, attempt: Attempt, place: Trace, before: Attempt | None, now_s: float
) -> Iterator[TraceSpan]:
    times, own = attempt.times, attempt.place
    assert own is not None, "it was kept because it is traced"
    end_s = times.ended_s or now_s
    error = attempt.outcome.result().error if _has_outcome(attempt) else None
    prefill, decode = attempt.pair
    about: dict[str, Attribute] = {
        **_of_choice(run),
        "pdserve.attempt": attempt.name.attempt,
        "pdserve.decode.worker": decode,
    }
    if prefill:
        about["pdserve.prefill.worker"] = prefill
    if times.first_token is not None:
        about["pdserve.cached_tokens"] = times.first_token.num_cached_tokens
    if times.started is not None:
        about["pdserve.kv.bytes"] = times.started.received_bytes
        about["pdserve.kv.transport"] = times.started.transport
    if error is not None:
        about["error.type"] = type(error).__name__
    moments = (
        ("granted", times.granted_s),
        ("first_token", times.first_token_s),
        ("started", times.started_s),
    )
    links = () if before is None or before.place is None else (before.place.span_id,)
    yield place.span(
        "attempt",
        times.credit_held_s,
        end_s,
        place=own,
        attributes=about,
        events=[SpanEvent(name, at_s) for name, at_s in moments if at_s is not None],
        links=links,
        error=_words(error),
    )
    granted_s = times.granted_s
    yield own.span("reserve", times.credit_held_s, end_s if granted_s is None else granted_s)
    if granted_s is not None:
        seen_s = end_s if times.first_seen_s is None else times.first_seen_s
        kind = SpanKind.CLIENT if prefill else SpanKind.INTERNAL
        yield own.span("prefill", granted_s, seen_s, place=attempt.prefill_place, kind=kind)


def _has_outcome(attempt: Attempt) -> bool:
    """Whether it ended by itself, not because nobody wanted it any longer."""
    return attempt.outcome.done() and not attempt.outcome.cancelled() and attempt.outcome.exception() is None


def _operation(asked: Asked) -> str:
    return "chat" if isinstance(asked.request.input, Chat) else "text_completion"


def _words(error: PdserveError | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}"


def _of_choice(run: ChoiceRun) -> dict[str, Attribute]:
    return {"pdserve.choice": run.choice.index}


def _about_request(
    asked: Asked,
    model: str,
    num_prompt_tokens: int,
    runs: Sequence[ChoiceRun],
    error: PdserveError | None,
) -> dict[str, Attribute]:
    """What the conventions name, but for texts: no prompt, no stop string, no answer is in a trace."""
    request, params = asked.request, asked.request.sampling
    choices = [run.choice for run in runs]
    about: dict[str, Attribute | None] = {
        "gen_ai.operation.name": _operation(asked),
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": request.model or model or None,
        "gen_ai.request.choice.count": request.n if request.n > 1 else None,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k or None,
        "gen_ai.request.frequency_penalty": params.frequency_penalty or None,
        "gen_ai.request.presence_penalty": params.presence_penalty or None,
        "gen_ai.response.id": asked.request_id,
        "gen_ai.response.model": model or None,
        "gen_ai.response.finish_reasons": tuple(
            "length" if choice.reason is FinishReason.LENGTH else "stop"
            for choice in choices
            if choice.reason
        )
        or None,
        "gen_ai.usage.input_tokens": num_prompt_tokens,
        "gen_ai.usage.output_tokens": sum(choice.num_generated for choice in choices),
        "error.type": None if error is None else type(error).__name__,
        "pdserve.status": "OK" if error is None else error.code.value,
        "pdserve.tenant": asked.caller.tenant or None,
        "pdserve.attempts": sum(run.num_attempts for run in runs),
    }
    if choices:
        about["gen_ai.usage.cache_read.input_tokens"] = choices[0].num_cached_tokens or 0
        about["gen_ai.server.time_to_first_token"] = choices[0].times.ttft_s
        about["gen_ai.server.time_per_output_token"] = choices[0].times.mean_gap_s
    return {key: value for key, value in about.items() if value is not None}
