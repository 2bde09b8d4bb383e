"""The events of one answer, gathered into the object that `pdserve generate --json` prints."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from pdserve.errors import InvariantViolated
from pdserve.response import Event, Finished, Prompt, Started, Tokens
from pdserve.sampling import TokenLogprobs


class Answer:
    """Grows with the events of a stream of n choices; their order is the client's business (`ResumableGeneration`)."""

    def __init__(self, n: int = 1) -> None:
        self._started: Started | None = None
        self._prompt_text = ""
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._n = n
        self._choices: dict[int, _Choice] = {}
        self._shown = ""

    @property
    def text(self) -> str:
        """Of the first choice, so far."""
        return self._choice(0).text

    @property
    def ends_line(self) -> bool:
        """Whether what `add` has given ends a line."""
        return self._shown.endswith("\n")

    def add(self, event: Event) -> str:
        """Take in one event; what is to be shown now: one choice as it comes, several one after another."""
        shown = self._add(event)
        self._shown = shown or self._shown
        return shown

    def _add(self, event: Event) -> str:
        match event:
            case Started():
                self._started = event
            case Prompt():
                self._prompt_text += event.text
                self._prompt_logprobs.extend(event.logprobs)
                return event.text
            case Tokens():
                self._choice(event.choice).add(event)
                return event.text if self._n == 1 else ""
            case Finished():
                choice = self._choice(event.choice)
                choice.finished = event
                if self._n > 1:
                    return choice.under_heading(event.choice)
        return ""

    def _choice(self, number: int) -> _Choice:
        return self._choices.setdefault(number, _Choice())

    def to_json(self) -> dict[str, Any]:
        """The whole answer. Raises InvariantViolated for a stream that ended without `finished`."""
        ended = [number for number in sorted(self._choices) if self._choices[number].finished is not None]
        if self._started is None or len(ended) < self._n:
            raise InvariantViolated("the stream ended before the answer was complete")
        found: dict[str, Any] = {
            "request_id": self._started.request_id,
            "model": self._started.model,
            "seed": self._started.seed,
            "prompt_token_ids": list(self._started.prompt_token_ids),
        }
        if self._prompt_text:
            found["prompt_text"] = self._prompt_text
        if self._prompt_logprobs:
            found["prompt_logprobs"] = _logprobs(self._prompt_logprobs)
        choices = [self._choices[number].to_json() for number in ended]
        found |= choices[0]
        if len(choices) > 1:
            found["choices"] = choices
        return found


class _Choice:
    def __init__(self) -> None:
        self.finished: Finished | None = None
        self._token_ids: list[int] = []
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprobs] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def add(self, event: Tokens) -> None:
        self._token_ids.extend(event.token_ids)
        self._texts.append(event.text)
        self._logprobs.extend(event.logprobs)

    def under_heading(self, number: int) -> str:
        text = self.text
        return f"--- {number}\n{text}" + ("" if text.endswith("\n") else "\n")

    def to_json(self) -> dict[str, Any]:
        finished = self.finished
        assert finished is not None, "asked for when all have ended"
        usage = finished.usage
        found: dict[str, Any] = {"token_ids": self._token_ids, "text": self.text}
        if self._logprobs:
            found["logprobs"] = _logprobs(self._logprobs)
        found |= {
            "finish_reason": finished.reason.value,
            "usage": {
                "prompt": usage.num_prompt_tokens,
                "cached": usage.num_cached_tokens,
                "completion": usage.num_completion_tokens,
            },
            "timings": {
                name: round(value, 3) for name, value in dataclasses.asdict(finished.timings).items()
            },
            "attempts": finished.num_attempts,
            "prefill_worker": finished.prefill_worker,
            "decode_worker": finished.decode_worker,
            "kv_bytes": finished.kv_bytes,
            "transport": finished.transport,
        }
        if finished.energy is not None:
            energy = dataclasses.asdict(finished.energy)
            found["energy"] = {name: joules for name, joules in energy.items() if joules is not None}
        return found


def _logprobs(logprobs: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
    return [{"logprob": each.logprob, "top": [list(pair) for pair in each.top]} for each in logprobs]
