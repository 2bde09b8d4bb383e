"""The events of one answer, gathered into the object that `pdserve generate --json` prints."""

from __future__ import annotations

import dataclasses
from typing import Any

from pdserve.errors import InvariantViolated
from pdserve.response import Event, Finished, Started, Tokens


class Answer:
    """Grows with the events of a stream of one choice."""

    def __init__(self) -> None:
        self._started: Started | None = None
        self._finished: Finished | None = None
        self._token_ids: list[int] = []
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._texts)

    def add(self, event: Event) -> str:
        """Take in one event; the new text. Their order is the client's business (`Generation`)."""
        match event:
            case Started():
                self._started = event
            case Tokens():
                self._token_ids.extend(event.token_ids)
                self._texts.append(event.text)
                return event.text
            case Finished():
                self._finished = event
        return ""

    def to_json(self) -> dict[str, Any]:
        """The whole answer. Raises InvariantViolated for a stream that ended without `finished`."""
        if self._started is None or self._finished is None:
            raise InvariantViolated("the stream ended before the answer was complete")
        usage = self._finished.usage
        return {
            "request_id": self._started.request_id,
            "model": self._started.model,
            "seed": self._started.seed,
            "prompt_token_ids": list(self._started.prompt_token_ids),
            "token_ids": self._token_ids,
            "text": self.text,
            "finish_reason": self._finished.reason.value,
            "usage": {
                "prompt": usage.num_prompt_tokens,
                "cached": usage.num_cached_tokens,
                "completion": usage.num_completion_tokens,
            },
            "timings": {
                name: round(value, 3) for name, value in dataclasses.asdict(self._finished.timings).items()
            },
            "attempts": self._finished.num_attempts,
            "prefill_worker": self._finished.prefill_worker,
            "decode_worker": self._finished.decode_worker,
            "kv_bytes": self._finished.kv_bytes,
            "transport": self._finished.transport,
        }
