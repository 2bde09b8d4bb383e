"""Logprobs of one attempt's prompt as a worker sends them, chunk by chunk, before the first token."""

from __future__ import annotations

from pdserve.errors import InvariantViolated
from pdserve.messages import PromptLogprobs, StartDecode
from pdserve.sampling import TokenLogprobs


class PromptScores:
    """Event-loop thread only. The prompt's first token has none."""

    def __init__(self, order: StartDecode) -> None:
        asked = order.key.params.prompt_logprobs is not None
        self._num_wanted = order.num_prompt_tokens - 1 if asked else 0
        self._tokens: list[TokenLogprobs] = []

    @property
    def missing(self) -> bool:
        """Whether some are still to come."""
        return len(self._tokens) < self._num_wanted

    @property
    def tokens(self) -> tuple[TokenLogprobs, ...]:
        """Of the tokens from index 1 on."""
        return tuple(self._tokens)

    def add(self, message: PromptLogprobs) -> None:
        """The next ones. Raises InvariantViolated if they were not asked for, or leave a gap."""
        due = len(self._tokens) + 1
        fits = 0 < len(message.tokens) <= self._num_wanted - len(self._tokens)
        if message.first_position != due or not fits:
            raise InvariantViolated(
                "other prompt logprobs than asked for",
                want=f"{due} to {self._num_wanted}",
                got=message.first_position,
                count=len(message.tokens),
            )
        self._tokens.extend(message.tokens)
