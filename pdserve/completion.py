"""What a client holds of a generation: enough to go on at another router, and the collected result."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from dataclasses import dataclass

from pdserve.errors import InvariantViolated
from pdserve.request import Event, Finished, GenerateRequest, Prompt, Resume, ResumeChoice, Started, Tokens
from pdserve.sampling import TokenLogprobs


@dataclass(frozen=True, slots=True)
class CompletedChoice:
    """One whole output; logprobs: one a token if they were asked for."""

    text: str
    token_ids: tuple[int, ...]
    finished: Finished
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole generation; `text`, `token_ids` and `finished` are those of the first choice.

    prompt_text      the echo, if asked for
    prompt_logprobs  if asked for: of the prompt's tokens from index 1 on
    """

    started: Started
    choices: tuple[CompletedChoice, ...]
    prompt_text: str = ""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def finished(self) -> Finished:
        return self.choices[0].finished


class ResumableGeneration:
    """One request over any number of routers: every event reaches the caller once, in order."""

    def __init__(self, request: GenerateRequest) -> None:
        self._request = request
        self._started: Started | None = None
        self._num_prompt = 0  # tokens of the prompt's parts so far
        held = request.resume.choices if request.resume is not None else ()
        self._ids: dict[int, list[int]] = {n: list(each.token_ids) for n, each in enumerate(held)}
        self._reasons = {n: each.finish_reason for n, each in enumerate(held) if each.finish_reason}

    @property
    def finished(self) -> bool:
        """Whether every choice has ended, whatever the stream's status says."""
        return len(self._reasons) == self._request.n

    def check_whole(self) -> None:
        """The stream ended with OK. Raises InvariantViolated unless every choice has ended."""
        if not self.finished:
            raise InvariantViolated("a stream ended with OK but without its last message")

    def next_request(self) -> GenerateRequest:
        """What to send to the next router: the request, with what is held of it."""
        resume = self.resume()
        if resume is None:
            return self._request
        started = self._started
        request_id = started.request_id if started is not None else self._request.request_id
        if self._all_at_the_end:
            resume_with = None  # the same seed gives the same choices, of which `take` drops what is held
        else:
            resume_with = resume
        return dataclasses.replace(self._request, request_id=request_id, seed=resume.seed, resume=resume_with)

    @property
    def _all_at_the_end(self) -> bool:
        """Whether each choice comes whole: its tokens are one event."""
        return self._request.num_generated_choices > self._request.n

    def resume(self) -> Resume | None:
        """What is held; None before the first `started`, since without a seed nothing can go on."""
        if self._started is None:
            return self._request.resume
        return Resume(self._started.seed, tuple(self._held(n) for n in range(self._request.n)))

    def take(self, event: Event) -> list[Event]:
        """Note an event; returns it if it is new to the caller. Raises InvariantViolated for a gap."""
        match event:
            case Started():
                is_first = self._started is None
                self._started = self._started or event
                return [event] if is_first else []
            case Finished():
                is_first = event.choice not in self._reasons
                self._reasons.setdefault(event.choice, event.reason)
                return [event] if is_first else []
            case Tokens():
                return self._take_tokens(event)
            case Prompt():
                return self._take_prompt(event)

    def _take_tokens(self, event: Tokens) -> list[Event]:
        held = self._ids.setdefault(event.choice, [])
        if self._all_at_the_end and held and list(event.token_ids) == held:
            return []
        if event.first_index != len(held):
            raise InvariantViolated(
                "tokens are missing or came twice",
                choice=event.choice,
                want=len(held),
                got=event.first_index,
            )
        held.extend(event.token_ids)
        return [event]

    def _take_prompt(self, event: Prompt) -> list[Event]:
        """A router that took over before the first token sends the whole prompt again."""
        num_new = event.first_index + len(event.token_ids) - self._num_prompt
        if num_new <= 0:
            return []
        if event.first_index > self._num_prompt:
            raise InvariantViolated(
                "a part of the prompt is missing", want=self._num_prompt, got=event.first_index
            )
        is_first = self._num_prompt == 0
        self._num_prompt += num_new
        if is_first:
            return [event]
        token_ids, logprobs = event.token_ids[-num_new:], event.logprobs[-num_new:]
        first_index = self._num_prompt - num_new
        return [Prompt(first_index=first_index, token_ids=token_ids, logprobs=logprobs)]

    def _held(self, choice: int) -> ResumeChoice:
        return ResumeChoice(tuple(self._ids.get(choice, ())), self._reasons.get(choice))


async def collect(events: AsyncIterator[Event]) -> Completion:
    """The whole of a stream. Raises InvariantViolated if it ends without its last message."""
    started: Started | None = None
    ids: dict[int, list[int]] = {}
    texts: dict[int, list[str]] = {}
    logprobs: dict[int, list[TokenLogprobs]] = {}
    prompt_text = ""
    prompt_logprobs: list[TokenLogprobs] = []
    ended: dict[int, Finished] = {}
    async for event in events:
        match event:
            case Tokens():
                ids.setdefault(event.choice, []).extend(event.token_ids)
                texts.setdefault(event.choice, []).append(event.text)
                logprobs.setdefault(event.choice, []).extend(event.logprobs)
            case Started():
                started = event
            case Prompt():
                prompt_text += event.text
                prompt_logprobs.extend(event.logprobs)
            case Finished():
                ended[event.choice] = event
    if started is None or not ended:
        raise InvariantViolated("a stream ended with OK but without its last message")
    choices = [
        CompletedChoice(
            "".join(texts.get(n, ())), tuple(ids.get(n, ())), ended[n], tuple(logprobs.get(n, ()))
        )
        for n in sorted(ended)
    ]
    return Completion(started, tuple(choices), prompt_text, tuple(prompt_logprobs))
