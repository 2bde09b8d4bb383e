"""One request from acceptance to its single end: prepare, then attempts for each choice until all have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

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
from pdserve.request import GenerateRequest, Started, Tokens
from pdserve.sampling import SampleKey, SamplingParams, TokenLogprobs, end_token_ids
from pdserve.tokenizer import Tokenizer
from router.best_of import KeptTokens, best
from router.choice import Choice
from router.choice_run import Asked, ChoiceRun, Parts
from router.identity import ModelIdentity
from router.output import Output
from router.prompt_parts import prompt_parts
from router.structures import Compiled
from router.summary import log_finished
from router.validation import check_model, check_possible, check_prompt, check_start, resolve_max_tokens

log = structlog.get_logger()


class Conductor:
    """Event-loop thread only. `run` is a task of its own; `output` is what the client reads.

    deadline_left_s  of the client, from now
    """

    def __init__(
        self,
        parts: Parts,
        request: GenerateRequest,
        request_id: str,
        deadline_left_s: float,
        traceparent: str = "",
    ) -> None:
        self.request = request
        self.request_id = request_id
        self.traceparent = traceparent
        self.received_s = parts.clock.now_s()
        self.seed = 0
        self.prompt_ids: tuple[int, ...] = ()
        self.choices: list[Choice] = []
        self.runs: list[ChoiceRun] = []  # by choice
        self.output = Output(parts.clock, parts.config.timeouts.client_stall_s, self._client_stalled)
        self._parts = parts
        self._deadline_s = self.received_s + deadline_left_s
        self._task: asyncio.Task[None] | None = None
        self._cancelled_by: PdserveError | None = None
        self._first_started = asyncio.Event()
        self.on_stalled: Callable[[], None] = lambda: None
        self._num_closed = 0  # choices whose closing event has been put out
        self._ran = False
        self._model = ""
        self._begun = False
        # Each choice's tokens, if they go to the client only when all have ended (best_of above n).
        self._kept: list[KeptTokens] | None = [] if request.num_generated_choices > request.n else None
        self._delivered: list[Choice] = self.choices if self._kept is None else []  # by the client's numbers
        # A client that holds tokens holds all that comes before them.
        held = request.resume is not None and request.resume.holds_tokens
        self._prompt_logprobs = None if held else request.prompt_logprobs
        self._shows_prompt = not held and (request.echo or self._prompt_logprobs is not None)
        self._prompt_text = ""
        self._prompt_scores: tuple[TokenLogprobs, ...] = ()

    # --- from outside

    def bind(self, task: asyncio.Task[None]) -> None:
        """The task that `run` runs in."""
        self._task = task

    def cancel(self, error: PdserveError) -> None:
        """End the request with this error, now. Idempotent; the first error stays; no effect after a good end."""
        if self.output.complete or self._task is None or self._task.done():
            return
        if self._cancelled_by is None:
            self._cancelled_by = error
            self._task.cancel()

    def draining(self) -> Draining:
        """The error with which a draining router ends the request: enough to go on at another router."""
        shown = ",".join(str(choice.num_shown) for choice in self.choices) if self._kept is None else ""
        return Draining(
            "this router is draining: resume at another one with this seed and the token ids received",
            request_id=self.request_id,
            seed=self.seed,
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
            self.output.fail(error)
            self._log_finished(error)

    def on_taken(self, tokens: Tokens, now_s: float) -> None:
        """A token event leaves for the client."""
        self._delivered[tokens.choice].times.on_first_written(now_s)

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
                self.output.fail(error)
            self._parts.metrics.requests_running.dec()
            self._log_finished(error)

    def _log_finished(self, error: PdserveError | None) -> None:
        explain = self._parts.config.log.level == "debug"
        log_finished(self, error, self._parts.clock.now_s(), self._parts.metrics, explain=explain)

    def _bug(self, bug: BaseException) -> InvariantViolated:
        log.error("request.crashed", request_id=self.request_id, exc_info=bug)
        return InvariantViolated("internal error of the router", request_id=self.request_id)

    def _client_stalled(self) -> None:
        after_s = self._parts.config.timeouts.client_stall_s
        self.cancel(RequestCancelled("the client doesn't read its stream", after_s=after_s))
        self.on_stalled()

    async def _conduct(self) -> None:
        deadline = asyncio.timeout(self._left_s())
        try:
            async with deadline:
                with self._parts.admission.place() as give_back:
                    await self._prepare(give_back)
                    async with asyncio.TaskGroup() as group:
                        for run in self.runs:
                            group.create_task(self._conduct_choice(run))
                await self.output.all_taken()
        except TimeoutError:
            if deadline.expired():
                raise DeadlineExceeded(
                    "the deadline has passed", after_s=round(self._deadline_s - self.received_s, 3)
                ) from None
            raise

    def _left_s(self) -> float:
        return max(0.0, self._deadline_s - self._parts.clock.now_s())

    # --- before any reservation

    async def _prepare(self, give_back: Callable[[], None]) -> None:
        """Tokenize, check against the model, compile, make the choices. give_back: the place in the queue."""
        request, parts = self.request, self._parts
        tokenizer = await parts.text.get(parts.config.timeouts.worker_wait_s)
        identity = await parts.fleet.get_identity(parts.config.timeouts.worker_wait_s)
        check_model(request.model, identity.model)
        self._model = identity.model
        self.prompt_ids = await self._read_prompt(tokenizer)
        check_prompt(request, self.prompt_ids, parts.fleet.limits)
        max_tokens = resolve_max_tokens(request, len(self.prompt_ids), parts.fleet.window_tokens)
        if request.resume is not None:
            self.seed = request.resume.seed
        else:
            self.seed = request.seed if request.seed is not None else draw_id64(parts.random)
        key = SampleKey(
            params=self._worker_params(),
            seed=self.seed,
            choice=0,
            eos_token_ids=identity.eos_token_ids,
            max_tokens=max_tokens,
            bad_word_ids=await parts.text.bad_word_ids(tokenizer, request.sampling.bad_words),
        )
        check_possible(key, identity.vocab_size)
        compiled = await self._compile_structure(key, tokenizer)
        parts.metrics.prompt_tokens.inc(len(self.prompt_ids))
        for index in range(request.num_generated_choices):
            choice = self._make_choice(replace(key, choice=index), tokenizer, compiled)
            self.choices.append(choice)
            self.runs.append(self._make_run(choice, identity, give_back))

    async def _compile_structure(self, key: SampleKey, tokenizer: Tokenizer) -> Compiled | None:
        structure = key.params.structure
        if structure is None:
            return None
        compiled = await self._parts.structures.compile(structure, tokenizer)
        check_start(key, compiled.matcher(end_token_ids(key)))
        return compiled

    async def _read_prompt(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        request, text = self.request, self._parts.text
        if isinstance(request.input, tuple):
            ids = request.input
        else:
            ids = await text.encode(tokenizer, request.input)
        keep = request.truncate_prompt_tokens
        is_cut = keep is not None and keep < len(ids)
        if keep is not None and is_cut:
            ids = ids[-keep:]
        if self._shows_prompt and request.echo:
            as_given = isinstance(request.input, str) and not is_cut
            self._prompt_text = str(request.input) if as_given else await text.decode(tokenizer, ids)
        return ids

    def _worker_params(self) -> SamplingParams:
        """What workers are asked to do. Words are ids by then; choices can be compared only by their logprobs."""
        params = self.request.sampling
        logprobs = 0 if params.logprobs is None and self._kept is not None else params.logprobs
        return replace(params, bad_words=(), logprobs=logprobs, prompt_logprobs=self._prompt_logprobs)

    def _make_choice(self, key: SampleKey, tokenizer: Tokenizer, compiled: Compiled | None) -> Choice:
        parts, request = self._parts, self.request
        is_first = key.choice == 0
        if self._kept is not None:
            self._kept.append(KeptTokens())
        choice = Choice(
            self.prompt_ids,
            key,
            tokenizer.stream(),
            self.output if self._kept is None else self._kept[-1],
            self.received_s,
            parts.clock,
            parts.metrics,
            matcher=None if compiled is None else compiled.matcher(end_token_ids(key)),
            asks_for_scores=is_first and self._prompt_logprobs is not None and len(self.prompt_ids) > 1,
            shows_logprobs=request.sampling.logprobs is not None,
            on_begin=self._begin_stream,
            on_prompt_scores=self._take_prompt_scores,
            on_started=self._first_started.set,
        )
        if request.resume is not None and self._kept is None:
            choice.restore(request.resume.choice(key.choice))
        return choice

    def _make_run(self, choice: Choice, identity: ModelIdentity, give_back: Callable[[], None]) -> ChoiceRun:
        return ChoiceRun(
            self._parts,
            Asked(
                request=self.request,
                identity=identity,
                request_id=self.request_id,
                traceparent=self.traceparent,
                received_s=self.received_s,
                left_s=self._left_s,
            ),
            choice,
            begun=choice.num_generated > 0,
            prefer=self._first_pair if choice.index > 0 else lambda: None,
            on_placed=give_back,
        )

    def _take_prompt_scores(self, scores: tuple[TokenLogprobs, ...]) -> None:
        self._prompt_scores = scores
        self._begin_stream(0)  # none of it was a hit

    def _begin_stream(self, num_cached_tokens: int) -> None:
        """The first events of the stream, before the first token of any choice."""
        if self._begun:
            return
        self._begun = True
        self._parts.metrics.cached_tokens.inc(num_cached_tokens)
        self.output.put(
            Started(
                request_id=self.request_id,
                seed=self.seed,
                num_prompt_tokens=len(self.prompt_ids),
                num_cached_tokens=num_cached_tokens,
                prompt_token_ids=self.prompt_ids,
                model=self._model,
            )
        )
        if self._shows_prompt:
            for part in prompt_parts(self.prompt_ids, self._prompt_text, self._prompt_scores):
                self.output.put(part)

    # --- choices

    async def _conduct_choice(self, run: ChoiceRun) -> None:
        choice = run.choice
        if choice.index > 0:
            await self._first_started.wait()  # so that the prompt is in the prefix cache by then
        await run.run()
        if choice.index == 0:
            self._first_started.set()
        self._begin_stream(choice.num_cached_tokens or 0)
        if self._kept is None:
            self._put_finished(choice, choice.index)
        self._num_closed += 1
        if self._num_closed == len(self.choices):
            if self._kept is not None:
                self._deliver_best(self._kept)
            self.output.end()

    def _deliver_best(self, kept: list[KeptTokens]) -> None:
        self._delivered = best(self.choices, self.request.n)
        for number, choice in enumerate(self._delivered):
            self.output.put(kept[choice.index].deliver(number))
            self._put_finished(choice, number)

    def _put_finished(self, choice: Choice, number: int) -> None:
        """number: the client's, for this choice."""
        tries = self.runs[choice.index].tries
        self.output.put_made(lambda now_s: choice.finished(now_s, tries.num_attempts, number))

    def _first_pair(self) -> tuple[str, str] | None:
        return self.runs[0].pair
