"""best_of above n: choices are kept whole until all have ended, then the likeliest are delivered."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.request import Tokens
from router.choice import Choice


class KeptTokens:
    """One choice's tokens until it is known whether they are wanted. Event-loop thread only."""

    def __init__(self) -> None:
        self._events: list[Tokens] = []

    def put(self, event: Tokens) -> None:
        self._events.append(event)

    def deliver(self, choice: int) -> Tokens:
        """All of it as one event, under the client's number for it."""
        events = self._events
        return Tokens(
            choice=choice,
            first_index=0,
            token_ids=tuple(token_id for event in events for token_id in event.token_ids),
            text="".join(event.text for event in events),
            logprobs=tuple(logprobs for event in events for logprobs in event.logprobs),
        )


def best(choices: Sequence[Choice], n: int) -> list[Choice]:
    """The n of the highest sum of logprobs, best first; of equals the lower index."""
    return sorted(choices, key=lambda choice: (-choice.sum_logprob, choice.index))[:n]
