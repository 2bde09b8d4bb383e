"""What a client holds of a generation: enough to go on at another router, and the collected result."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from dataclasses import dataclass

from pdserve.errors import InvariantViolated
from pdserve.request import Event, Finished, GenerateRequest, Resume, ResumeChoice, Started, Tokens


@dataclass(frozen=True, slots=True)
class CompletedChoice:
    """One whole output."""

    text: str
    token_ids: tuple[int, ...]
    finished: Finished


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole generation; `text`, `token_ids` and `finished` are those of the first choice."""

    started: Started
    choices: tuple[CompletedChoice, ...]

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def finished(self) -> Finished:
        return self.choices[0].finished


class Generation:
    """One request over any number of routers: every event reaches the caller once, in order."""

    def __init__(self, request: GenerateRequest) -> None:
        self._request = request
        self._started: Started | None = None
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
            raise InvariantViolated("a stream ended with OK and without its last message")

    def next_request(self) -> GenerateRequest:
        """What to send to the next router: the request, with what is held of it."""
        resume = self.resume()
        if resume is None:
            return self._request
        started = self._started
        request_id = started.request_id if started is not None else self._request.request_id
        return dataclasses.replace(self._request, request_id=request_id, seed=resume.seed, resume=resume)

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
                held = self._ids.setdefault(event.choice, [])
                if event.first_index != len(held):
                    raise InvariantViolated(
                        "tokens are missing or came twice",
                        choice=event.choice,
                        want=len(held),
                        got=event.first_index,
                    )
                held.extend(event.token_ids)
                return [event]

    def _held(self, choice: int) -> ResumeChoice:
        return ResumeChoice(tuple(self._ids.get(choice, ())), self._reasons.get(choice))


async def collect(events: AsyncIterator[Event]) -> Completion:
    """The whole of a stream. Raises InvariantViolated if it ends without its last message."""
    started: Started | None = None
    ids: dict[int, list[int]] = {}
    texts: dict[int, list[str]] = {}
    ended: dict[int, Finished] = {}
    async for event in events:
        match event:
            case Tokens():
                ids.setdefault(event.choice, []).extend(event.token_ids)
                texts.setdefault(event.choice, []).append(event.text)
            case Started():
                started = event
            case Finished():
                ended[event.choice] = event
    if started is None or not ended:
        raise InvariantViolated("a stream ended with OK and without its last message")
    choices = [
        CompletedChoice("".join(texts.get(n, ())), tuple(ids.get(n, ())), ended[n]) for n in sorted(ended)
    ]
    return Completion(started, tuple(choices))
