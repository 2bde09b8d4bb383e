"""One choice of a request: its ids, its text, and where it ended. Attempts come and go; this stays."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from pdserve.clock import Clock
from pdserve.detokenizer import TextStream
from pdserve.errors import InvalidRequest, InvariantViolated, RowFailed
from pdserve.messages import DecodeStarted, FirstToken, SequenceFinished
from pdserve.request import Finished, ResumeChoice, Tokens, Usage
from pdserve.response import known_energy
from pdserve.sampling import FinishReason, SampleKey, TokenLogprobs
from pdserve.steps import Steps
from pdserve.token_matcher import TokenMatcher, finish_by
from router.metrics import RouterMetrics
from router.stop_text import ReleasedText, StopText
from router.timings import AttemptTimes, ChoiceTimes

_RESTORED_AT_ONCE = 512  # tokens, some milliseconds


class Choice:
    """Takes the tokens of its attempts in, each index once, and gives them out. Event-loop thread only.

    put              takes its tokens: to the client, or to where they are kept until the best choices are known
    matcher          of the structure that its text must have
    asks_for_scores  whether its next attempt must make the logprobs of the prompt's tokens
    shows_logprobs   False: they are made to compare choices only
    on_begin         called before the first token is given out: how many of the prompt's were cached, their logprobs
    has_started      a decode worker has said that it runs there, and the prompt's logprobs are here; or it has ended
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        key: SampleKey,
        stream: TextStream,
        put: Callable[[Tokens], None],
        received_s: float,
        clock: Clock,
        metrics: RouterMetrics,
        *,
        matcher: TokenMatcher | None = None,
        asks_for_scores: bool,
        shows_logprobs: bool,
        on_begin: Callable[[int, tuple[TokenLogprobs, ...]], None],
    ) -> None:
        self.key = key
        self.ids = list(prompt_ids)  # prompt and all tokens so far, those held back included
        self.num_prompt_tokens = len(prompt_ids)
        self.reason: FinishReason | None = None
        self.times = ChoiceTimes(received_s)
        self.num_shown = 0  # tokens given out, or held by the client already
        self.num_cached_tokens: int | None = None
        self.pair: tuple[str, str] | None = None  # ids of the workers of its last attempt
        self.kv_bytes = 0
        self.transport = ""
        self.sum_logprob = 0.0
        self._prefill_energy_j: float | None = None
        self._decode_energy_j: float | None = None  # None: no worker could tell any
        self._energy_of: AttemptTimes | None = None  # the attempt that has told of it last,
        self._energy_before_j = 0.0  # and what those before it took
        self.asks_for_scores = asks_for_scores
        self.has_started = asyncio.Event()
        self._shows_logprobs = shows_logprobs
        self._held_logprobs: deque[TokenLogprobs] = deque()  # of tokens not given out yet
        self._stream = stream
        self._matcher = matcher
        self._stop = StopText(key.params.stop, key.params.include_stop)
        self._put = put
        self._clock = clock
        self._metrics = metrics
        self._on_begin = on_begin

    @property
    def attempt_key(self) -> SampleKey:
        """The key for its next attempt: prompt logprobs are made once."""
        if self.asks_for_scores or self.key.params.prompt_logprobs is None:
            return self.key
        return replace(self.key, params=replace(self.key.params, prompt_logprobs=None))

    @property
    def index(self) -> int:
        """Which one of the request's choices."""
        return self.key.choice

    @property
    def num_generated(self) -> int:
        """Tokens so far, those held back included."""
        return len(self.ids) - self.num_prompt_tokens

    def restore(self, held: ResumeChoice) -> Steps[None]:
        """Take over what the client was shown by another router, without showing it again.

        Ends the choice if these tokens end it, or if the client knows that it has ended. Any one thread may do it,
        before the choice is given to others.
        Raises InvalidRequest if the structure doesn't allow them.
        """
        for index, token_id in enumerate(held.token_ids):
            if index % _RESTORED_AT_ONCE == _RESTORED_AT_ONCE - 1:
                yield
            if self.reason is None:
                try:
                    self._take(token_id)
                except InvariantViolated as broken:
                    raise InvalidRequest(
                        "resume.token_ids are no beginning of the structure",
                        choice=self.index,
                        index=index,
                        value=token_id,
                    ) from broken
        self._stop.note_shown()  # whatever this router would hold back, the client has it
        self.num_shown = self.num_generated
        if self.reason is None:
            self.reason = held.finish_reason

    # --- what an attempt tells; attempt: its moments, which stand for it

    def on_prompt_logprobs(self, tokens: tuple[TokenLogprobs, ...]) -> None:
        """All of the prompt's, before the first token."""
        self.asks_for_scores = False
        self._on_begin(0, tokens)  # none of it was a hit
        if self.times.started is not None:
            self.has_started.set()

    def on_tokens(
        self,
        attempt: AttemptTimes,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...],
        energy_j: float | None,
    ) -> None:
        """The next tokens of the attempt, in order; what comes behind the end is overrun.

        logprobs  one a token, if they were asked for
        energy_j  of decoding in this attempt so far, if the worker can tell
        """
        read_s = self._clock.now_s()
        self._note_decode_energy(attempt, energy_j)
        ids: list[int] = []
        text = ""
        count = 0
        for place, token_id in enumerate(token_ids):
            if self.reason is not None:
                self._metrics.overrun_tokens.inc()
                continue
            count += 1
            if self.key.params.only_prompt:
                self.reason = FinishReason.LENGTH
                continue
            if logprobs:
                self.sum_logprob += logprobs[place].logprob
                self._held_logprobs.append(logprobs[place])
            released = self._take(token_id)
            ids.extend(released.token_ids)
            text += released.text
        for gap_s in self.times.on_tokens(count, read_s, attempt):
            self._metrics.itl_s.observe(gap_s)
        if ids:
            self._on_begin(self.num_cached_tokens or 0, ())
            first_index, self.num_shown = self.num_shown, self.num_shown + len(ids)
            self._metrics.tokens.inc(len(ids))
            self._put(
                Tokens(
                    choice=self.index,
                    first_index=first_index,
                    token_ids=tuple(ids),
                    text=text,
                    logprobs=self._logprobs_of(len(ids)),
                )
            )

    def _logprobs_of(self, count: int) -> tuple[TokenLogprobs, ...]:
        """Of the oldest tokens that are given out now."""
        if not self._held_logprobs:
            return ()
        taken = tuple(self._held_logprobs.popleft() for _ in range(count))
        return taken if self._shows_logprobs else ()

    def on_first_token(self, message: FirstToken) -> None:
        """P's figures, once an attempt, before its token or after it."""
        if self.num_cached_tokens is None:
            self.num_cached_tokens = min(message.num_cached_tokens, self.num_prompt_tokens)
        self._note_prefill_energy(message.energy_j)

    def on_started(self, attempt: AttemptTimes, message: DecodeStarted) -> None:
        """D's figures, and its verdict."""
        if self.num_cached_tokens is None and attempt.local:
            self.num_cached_tokens = min(message.num_cached_tokens, self.num_prompt_tokens)
        self.times.started = message
        self.kv_bytes, self.transport = message.received_bytes, message.transport
        self._metrics.kv_bytes.inc(message.received_bytes)
        self._metrics.kv_transfer_s.inc(message.transfer_s)
        self._note_prefill_energy(message.energy_j)
        if not self.asks_for_scores:
            self.has_started.set()

    def on_finished(self, attempt: AttemptTimes, message: SequenceFinished) -> None:
        """D's figures at the end."""
        self.times.finished = message
        self._note_decode_energy(attempt, message.energy_j)

    def _note_prefill_energy(self, energy_j: float | None) -> None:
        if energy_j is not None:
            self._prefill_energy_j = (self._prefill_energy_j or 0.0) + energy_j

    def _note_decode_energy(self, attempt: AttemptTimes, energy_j: float | None) -> None:
        """energy_j: of this attempt from its start to here."""
        if energy_j is None:
            return
        if attempt is not self._energy_of:
            self._energy_of, self._energy_before_j = attempt, self._decode_energy_j or 0.0
        self._decode_energy_j = self._energy_before_j + energy_j

    # --- text

    def _take(self, token_id: int) -> ReleasedText:
        """Append one token; returns what may be shown now, and sets the reason if it is the last."""
        self.ids.append(token_id)
        num_generated = self.num_generated
        try:
            reason = finish_by(self.key, token_id, num_generated, self._matcher)
        except RowFailed as error:
            raise InvariantViolated("a worker's token breaks the structure", **error.fields) from error
        hidden = reason in (FinishReason.EOS, FinishReason.STOP_TOKEN) and not self.key.params.include_stop
        text = "" if hidden else self._stream.step((token_id,))
        if reason is not None:
            text += self._stream.flush()
        if num_generated < self.key.params.min_tokens:
            released = self._stop.pass_through(token_id, text)
        else:
            released = self._stop.push(token_id, text)
        if released.stopped:
            self.reason = FinishReason.STOP_TEXT
            return released
        self.reason = reason
        if reason is None:
            return released
        rest = self._stop.flush()
        return ReleasedText(released.token_ids + rest.token_ids, released.text + rest.text)

    # --- end

    def finished(self, now_s: float, num_attempts: int, delivered_as: int) -> Finished:
        """The closing event; now_s: when the client takes it; delivered_as: the client's number for this choice."""
        assert self.reason is not None, "a choice finishes with a reason"
        if self.key.params.only_prompt:
            self.times.on_first_written(now_s)  # all that comes
        prefill, decode = self.pair or ("", "")
        return Finished(
            choice=delivered_as,
            reason=self.reason,
            usage=Usage(
                num_prompt_tokens=self.num_prompt_tokens,
                num_cached_tokens=self.num_cached_tokens or 0,
                num_completion_tokens=self.num_generated,
            ),
            timings=self.times.timings(now_s),
            num_attempts=num_attempts,
            prefill_worker=prefill,
            decode_worker=decode,
            kv_bytes=self.kv_bytes,
            transport=self.transport,
            energy=known_energy(self._prefill_energy_j, self._decode_energy_j),
        )
