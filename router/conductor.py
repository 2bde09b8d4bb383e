"""One request from acceptance to its single end: prepare, then attempts for each choice until all have ended."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Self

import structlog

from pdserve.errors import (
    DeadlineExceeded,
    Draining,
    InvariantViolated,
    PdserveError,
    RequestCancelled,
    primary,
)
from pdserve.ids import draw_id64
from pdserve.request import Event, Started, Tokens
from pdserve.sampling import SampleKey, SamplingParams, TokenLogprobs, end_token_ids
from pdserve.tokenizer import Tokenizer
from router.asked import Asked
from router.choice import Choice
from router.choice_run import ChoiceRun, Parts
from router.output import Output
from router.phase_clock import AttemptPhase
from router.prompt_parts import prompt_parts
from router.spans import request_spans
from router.structures import Compiled
from router.summary import log_finished
from router.validation import check_model, check_possible, check_prompt, check_start, resolve_max_tokens

log = structlog.get_logger()


def phases_of(conductors: Iterable[Conductor]) -> dict[str, int]:
    """How many attempts are in each phase."""
    runs = (run for conductor in conductors for run in conductor.runs)
    found = Counter(run.attempt.phase for run in runs if run.attempt is not None)
    return {phase.value: found[phase] for phase in AttemptPhase if phase is not AttemptPhase.ENDED}


class Conductor:
    """Async iterator over the request's events for its one reader; raises what it ended with. Event-loop thread only.

    `run` is a task of its own, which `bind` names; on_stalled is called when the client is given up.

    on_placed  called when it has a pair for the first time
    """

    def __init__(self, parts: Parts, asked: Asked, on_placed: Callable[[], None]) -> None:
        request = asked.request
        self.request_id = asked.request_id
        self.runs: list[ChoiceRun] = []  # by choice
        self.on_stalled: Callable[[], None] = lambda: None
        self._parts = parts
        self._asked = asked
        self._on_placed = on_placed
        self._seed = 0
        self._prompt_ids: tuple[int, ...] = ()
        self._output = Output(parts.clock, parts.config.timeouts.client_stall_s, self._client_stalled)
        self._task: asyncio.Task[None] | None = None
        self._cancelled_by: PdserveError | None = None
        self._num_closed = 0  # choices whose closing event has been put out
        self._ran = False
        self._model = ""
        self._begun = False
        # Each choice's tokens, if they go to the client only when all have ended (best_of above n).
        self._kept: list[list[Tokens]] | None = [] if request.num_generated_choices > request.n else None
        self._delivered = self.runs  # by the client's numbers; of choices that are kept, when it is known
        # A client that holds tokens holds all that comes before them.
        held = request.resume is not None and request.resume.holds_tokens
        self._prompt_logprobs = None if held else request.prompt_logprobs
        self._shows_prompt = not held and (request.echo or self._prompt_logprobs is not None)
        self._prompt_text = ""

    # --- its reader

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        event = self._written(await self._output.take())
        if event is None:
            raise StopAsyncIteration
        return event

    def follow(self, on_ready: Callable[[], None]) -> None:
        """For a reader that serves many: told when `take_now` has an answer, from now on."""
        self._output.on_ready = on_ready
        if self._output.ready:
            on_ready()

    @property
    def ready(self) -> bool:
        """Whether `take_now` has an answer."""
        return self._output.ready

    def take_now(self) -> Event | None:
        """The next event, None at the end; raises what the request ended with. Only when it is ready."""
        return self._written(self._output.take_now())

    def _written(self, event: Event | None) -> Event | None:
        if isinstance(event, Tokens):
            self._delivered[event.choice].choice.times.on_first_written(self._parts.clock.now_s())
        return event

    def close(self) -> None:
        """The client is gone: nothing more is computed for it. Idempotent; no effect after the end."""
        self.cancel(RequestCancelled("the client went away"))
        self._output.close()

    # --- from outside

    def bind(self, task: asyncio.Task[None]) -> None:
        """The task that `run` runs in."""
        self._task = task

    def cancel(self, error: PdserveError) -> None:
        """End the request with this error, now. Idempotent; the first error stays; no effect after a good end."""
        if self._output.complete or self._task is None or self._task.done():
            return
        if self._cancelled_by is None:
            self._cancelled_by = error
            self._task.cancel()

    def draining(self) -> Draining:
        """The error with which a draining router ends the request: enough to go on at another router."""
        shown = ",".join(str(run.choice.num_shown) for run in self.runs) if self._kept is None else ""
        return Draining(
            "this router is draining: resume at another one with this seed and the token ids received",
            request_id=self.request_id,
            seed=self._seed,
            num_tokens=shown,
        )

    @property
    def waits(self) -> bool:
        """Whether nothing has been begun for it yet: it is being prepared, or in the queue for the first time."""
        return not self._begun and all(run.attempt is None for run in self.runs)

    def finish_unrun(self) -> None:
        """The task has ended; if it was cancelled before its first turn, `run` never saw it."""
        if not self._ran:
            error = self._cancelled_by or RequestCancelled("the router stops")
            self._output.fail(error)
            self._log_finished(error)

    def log_if_stuck(self, now_s: float) -> None:
        """Say so once if an attempt has been in one state for long."""
        for run in self.runs:
            run.log_if_stuck(now_s)

    # --- the whole

    async def run(self) -> None:
        """Until the request has ended and the client has taken everything; raises only CancelledError."""
        self._ran = True
        self._parts.metrics.requests_running.inc()
        error: PdserveError | None = InvariantViolated("the request ended without an answer")
        try:
            await self._conduct()
            error = None
        except asyncio.CancelledError:
            error = self._cancelled_by
            if error is None:
                error = RequestCancelled("the router stops")
                raise
        except PdserveError as raised:
            error = raised
        except BaseExceptionGroup as group:
            found = primary(group)
            error = found if isinstance(found, PdserveError) else self._bug(found)
        except Exception as bug:  # the outermost frame of a request: the others go on
            error = self._bug(bug)
        finally:
            if error is not None:
                self._output.fail(error)
            self._parts.metrics.requests_running.dec()
            self._log_finished(error)

    def _log_finished(self, error: PdserveError | None) -> None:
        explain = self._parts.config.log.level == "debug"
        num_prompt_tokens, metrics = len(self._prompt_ids), self._parts.metrics
        log_finished(self._asked, num_prompt_tokens, self.runs, error, metrics, explain=explain)
        if self._asked.place is not None:
            now_s = self._parts.clock.now_s()
            self._parts.tracer.put(
                request_spans(self._asked, self._model, num_prompt_tokens, self.runs, error, now_s)
            )

    def _bug(self, bug: BaseException) -> InvariantViolated:
        log.error("request.crashed", request_id=self.request_id, exc_info=bug)
        return InvariantViolated("internal error of the router", request_id=self.request_id)

    def _client_stalled(self) -> None:
        after_s = self._parts.config.timeouts.client_stall_s
        self.cancel(RequestCancelled("the client doesn't read its stream", after_s=after_s))
        self.on_stalled()

    async def _conduct(self) -> None:
        asked = self._asked
        deadline = asyncio.timeout(asked.left_s())
        try:
            async with deadline:
                await self._prepare()
                async with asyncio.TaskGroup() as group:
                    for run in self.runs:
                        group.create_task(self._conduct_choice(run))
                await self._output.all_taken()
        except TimeoutError:
            if deadline.expired():
                raise DeadlineExceeded(
                    "the deadline has passed", after_s=round(asked.deadline_s - asked.received_s, 3)
                ) from None
            raise

    # --- before any reservation

    async def _prepare(self) -> None:
        """Tokenize, check against the model, compile, make the choices."""
        request, parts = self._asked.request, self._parts
        tokenizer = await parts.text.get(parts.config.timeouts.worker_wait_s)
        identity = await parts.fleet.get_identity(parts.config.timeouts.worker_wait_s)
        check_model(request.model, identity.model)
        self._model = identity.model
        self._prompt_ids = await self._read_prompt(tokenizer)
        held = () if request.resume is None else request.resume.choices
        await parts.turns.call(
            lambda: check_prompt(request, self._prompt_ids, parts.fleet.limits),
            user=self._asked.asker,
            num_bytes=len(self._prompt_ids) + sum(len(each.token_ids) for each in held),
        )
        max_tokens = resolve_max_tokens(request, len(self._prompt_ids), parts.fleet.window_tokens)
        if request.resume is not None:
            self._seed = request.resume.seed
        else:
            self._seed = request.seed if request.seed is not None else draw_id64(parts.random)
        key = SampleKey(
            params=self._worker_params(),
            seed=self._seed,
            choice=0,
            eos_token_ids=identity.eos_token_ids,
            max_tokens=max_tokens,
            bad_word_ids=await parts.text.bad_word_ids(
                tokenizer, request.sampling.bad_words, user=self._asked.asker
            ),
        )
        check_possible(key, identity.vocab_size)
        compiled = await self._compile_structure(key, tokenizer)
        parts.metrics.prompt_tokens.inc(len(self._prompt_ids))
        self._asked.caller.limits.take_tokens(len(self._prompt_ids))
        for index in range(request.num_generated_choices):
            choice = self._make_choice(replace(key, choice=index), tokenizer, compiled)
            if request.resume is not None and self._kept is None:
                shown = request.resume.choice(index)
                await parts.turns.run(
                    choice.restore(shown), user=self._asked.asker, num_bytes=len(shown.token_ids)
                )
            follows = self.runs[0].choice if self.runs else None
            self.runs.append(
                ChoiceRun(parts, self._asked, identity, choice, follows=follows, on_placed=self._on_placed)
            )

    async def _compile_structure(self, key: SampleKey, tokenizer: Tokenizer) -> Compiled | None:
        structure = key.params.structure
        if structure is None:
            return None
        compiled = await self._parts.structures.compile(structure, tokenizer, user=self._asked.asker)
        check_start(key, compiled.matcher(end_token_ids(key)))
        return compiled

    async def _read_prompt(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        request, text = self._asked.request, self._parts.text
        keep = request.truncate_prompt_tokens
        if isinstance(request.input, tuple):
            ids = request.input if keep is None else request.input[-keep:]
        else:
            limits = self._parts.fleet.limits
            ids = await text.encode(tokenizer, request.input, limits, user=self._asked.asker, keep=keep)
        if self._shows_prompt and request.echo:
            as_given = isinstance(request.input, str) and (keep is None or len(ids) < keep)
            self._prompt_text = (
                str(request.input) if as_given else await text.decode(tokenizer, ids, user=self._asked.asker)
            )
        return ids

    def _worker_params(self) -> SamplingParams:
        """What workers are asked to do. Words are ids by then; choices can be compared only by their logprobs."""
        params = self._asked.request.sampling
        logprobs = 0 if params.logprobs is None and self._kept is not None else params.logprobs
        return replace(params, bad_words=(), logprobs=logprobs, prompt_logprobs=self._prompt_logprobs)

    def _make_choice(self, key: SampleKey, tokenizer: Tokenizer, compiled: Compiled | None) -> Choice:
        parts, request = self._parts, self._asked.request
        deliver: Callable[[Tokens], None] = self._output.put
        if self._kept is not None:
            kept: list[Tokens] = []
            self._kept.append(kept)
            deliver = kept.append
        limits = self._asked.caller.limits

        def put(tokens: Tokens) -> None:
            limits.take_tokens(len(tokens.token_ids))
            deliver(tokens)

        return Choice(
            self._prompt_ids,
            key,
            tokenizer.stream(skip_special_tokens=not request.sampling.keep_special_tokens),
            put,
            self._asked.received_s,
            parts.clock,
            parts.metrics,
            matcher=None if compiled is None else compiled.matcher(end_token_ids(key)),
            asks_for_scores=key.choice == 0
            and self._prompt_logprobs is not None
            and len(self._prompt_ids) > 1,
            shows_logprobs=request.sampling.logprobs is not None,
            on_begin=self._begin_stream,
        )

    def _begin_stream(self, num_cached_tokens: int, scores: tuple[TokenLogprobs, ...]) -> None:
        """The first events of the stream, before the first token of any choice. scores: the prompt's, if asked for."""
        if self._begun:
            return
        self._begun = True
        self._parts.metrics.cached_tokens.inc(num_cached_tokens)
        self._output.put(
            Started(
                request_id=self.request_id,
                seed=self._seed,
                num_prompt_tokens=len(self._prompt_ids),
                num_cached_tokens=num_cached_tokens,
                prompt_token_ids=self._prompt_ids,
                model=self._model,
            )
        )
        if self._shows_prompt:
            for part in prompt_parts(self._prompt_ids, self._prompt_text, scores):
                self._output.put(part)

    # --- choices

    async def _conduct_choice(self, run: ChoiceRun) -> None:
        choice, first = run.choice, self.runs[0].choice
        if choice is not first:
            await first.has_started.wait()  # so that the prompt is in the prefix cache by then
        await run.run()
        choice.has_started.set()
        self._begin_stream(choice.num_cached_tokens or 0, ())
        if self._kept is None:
            self._put_finished(run, choice.index)
        self._num_closed += 1
        if self._num_closed == len(self.runs):
            if self._kept is not None:
                self._deliver_best(self._kept)
            self._output.end()

    def _deliver_best(self, kept: list[list[Tokens]]) -> None:
        """The n of the highest sum of logprobs, best first; of equals the lower index."""
        ranked = sorted(self.runs, key=lambda run: -run.choice.sum_logprob)
        self._delivered = ranked[: self._asked.request.n]
        for number, run in enumerate(self._delivered):
            for event in kept[run.choice.index]:
                self._output.put(replace(event, choice=number))
            self._put_finished(run, number)

    def _put_finished(self, run: ChoiceRun, number: int) -> None:
        """number: the client's, for this choice."""
        self._output.put_made(lambda now_s: run.choice.finished(now_s, run.num_attempts, number))
