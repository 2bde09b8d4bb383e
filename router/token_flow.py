"""What one attempt gives its choice, in order: the prompt's logprobs, the first token, later tokens.

The first token comes from whom it comes first; later ones are held until then, and all of them until the prompt's
logprobs are here, if these were asked for.
"""

from __future__ import annotations

from pdserve.errors import InvariantViolated
from pdserve.messages import PromptLogprobs, StartDecode, StepTokens
from pdserve.sampling import TokenLogprobs
from router.choice import Choice
from router.timings import AttemptTimes


class TokenFlow:
    """Raises InvariantViolated for what no correct worker says. Event-loop thread only.

    num_ids  length of the sequence's ids so far
    """

    def __init__(self, start: StartDecode, choice: Choice, times: AttemptTimes) -> None:
        params = start.key.params
        self.num_ids = len(start.token_ids)
        self._choice = choice
        self._times = times
        self._wants_logprobs = params.logprobs is not None
        self._num_scores = start.num_prompt_tokens - 1 if params.prompt_logprobs is not None else 0
        self._scores: list[TokenLogprobs] = []  # of the prompt's tokens from index 1 on
        self._first: int | None = None
        self._held_first: tuple[int, TokenLogprobs | None] | None = None
        self._early: list[StepTokens] = []

    @property
    def has_first(self) -> bool:
        """Whether the first token was given."""
        return self._first is not None

    @property
    def lacks_scores(self) -> bool:
        """Whether some of the prompt's logprobs are still to come."""
        return len(self._scores) < self._num_scores

    def take_scores(self, message: PromptLogprobs) -> None:
        """The next of the prompt's logprobs."""
        due = len(self._scores) + 1
        fits = 0 < len(message.tokens) <= self._num_scores - len(self._scores)
        if message.first_position != due or not fits:
            raise InvariantViolated(
                "other prompt logprobs than asked for",
                want=f"{due} to {self._num_scores}",
                got=message.first_position,
                count=len(message.tokens),
            )
        self._scores.extend(message.tokens)
        if not self.lacks_scores:
            self._choice.on_prompt_logprobs(tuple(self._scores))
            if self._held_first is not None:
                self.take_first(*self._held_first)

    def take_first(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """The first token, maybe for a second time."""
        if self.lacks_scores:
            self._held_first = (token_id, logprobs)
        elif self._first is None:
            self._first = token_id
            self._give((token_id,), () if logprobs is None else (logprobs,), None)
            early, self._early = self._early, []
            for tokens in early:
                self.take(tokens)
        elif self._first != token_id:
            raise InvariantViolated("two first tokens of one attempt", shown=self._first, got=token_id)

    def take(self, message: StepTokens) -> bool:
        """Later tokens. Returns whether they were given out, not held."""
        if self._first is None:
            self._early.append(message)
            return False
        if message.first_position != self.num_ids:
            raise InvariantViolated("tokens out of order", want=self.num_ids, got=message.first_position)
        self._give(message.token_ids, message.logprobs, message.energy_j)
        return True

    def _give(
        self, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...], energy_j: float | None
    ) -> None:
        if not self._wants_logprobs:
            logprobs = ()
        elif len(logprobs) != len(token_ids):
            raise InvariantViolated("tokens without their logprobs", want=len(token_ids), got=len(logprobs))
        self.num_ids += len(token_ids)
        self._choice.on_tokens(self._times, token_ids, logprobs, energy_j)
