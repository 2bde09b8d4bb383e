"""The tokens of one attempt, in order: the first from whom it comes first, later ones held until then."""

from __future__ import annotations

from collections.abc import Callable

from pdserve.errors import InvariantViolated
from pdserve.messages import StartDecode, StepTokens
from pdserve.sampling import TokenLogprobs

Give = Callable[[tuple[int, ...], tuple[TokenLogprobs, ...], float | None], bool]
"""Takes the next tokens, their logprobs and energy; whether the choice has ended with them, or before."""


class TokenFlow:
    """Raises InvariantViolated for what no correct worker says. Event-loop thread only.

    num_ids  length of the sequence's ids so far; ended: the choice has ended with the tokens given
    """

    def __init__(self, order: StartDecode, give: Give) -> None:
        self.num_ids = len(order.token_ids)
        self.ended = False
        self._wants_logprobs = order.key.params.logprobs is not None
        self._give = give
        self._first: int | None = None
        self._early: list[StepTokens] = []

    @property
    def has_first(self) -> bool:
        """Whether the first token is known."""
        return self._first is not None

    def take_first(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """The first token, maybe for a second time."""
        if self._first is not None:
            if self._first != token_id:
                raise InvariantViolated("two first tokens of one attempt", shown=self._first, got=token_id)
            return
        self._first = token_id
        self._pass_on((token_id,), () if logprobs is None else (logprobs,), None)
        early, self._early = self._early, []
        for tokens in early:
            self.take(tokens)

    def take(self, message: StepTokens) -> bool:
        """Later tokens. Returns whether they were given out, not held."""
        if self._first is None:
            self._early.append(message)
            return False
        if message.first_position != self.num_ids:
            raise InvariantViolated("tokens out of order", want=self.num_ids, got=message.first_position)
        self._pass_on(message.token_ids, message.logprobs, message.energy_j)
        return True

    def _pass_on(
        self, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...], energy_j: float | None
    ) -> None:
        if not self._wants_logprobs:
            logprobs = ()
        elif len(logprobs) != len(token_ids):
            raise InvariantViolated("tokens without their logprobs", want=len(token_ids), got=len(logprobs))
        self.num_ids += len(token_ids)
        self.ended = self._give(token_ids, logprobs, energy_j)
