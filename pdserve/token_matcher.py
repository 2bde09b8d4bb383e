"""What a structure asks of the next token: the port between samplers and grammar libraries.

Implementation: `pdserve.grammar.matcher` over a library; tests have one over a list of texts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from pdserve.sampling import FinishReason, SampleKey, finish_reason

if TYPE_CHECKING:  # a router without structures needs no numpy
    from pdserve.token_mask import TokenMask


class TokenMatcher(Protocol):
    """How far one choice's text has come in its structure. One owner.

    A pure function of the structure and of the ids that it took in, so a new one that takes in the same ids stands at
    the same place, on whatever worker.
    """

    @property
    def is_complete(self) -> bool:
        """Whether the text is whole and nothing may follow it."""
        ...

    def mask(self) -> TokenMask:
        """The tokens that may follow. A new array.

        Those whose text, behind the text so far, begins some text of the structure; the ends (end-of-sequence, stop
        ids) where the text so far is one, and only there. Raises RowFailed if the library gives up.
        """
        ...

    def take(self, token_id: int) -> None:
        """One token more, which must not be one of the ends. Raises RowFailed if it can't follow."""
        ...


def finish_by(
    key: SampleKey, token_id: int, num_generated: int, matcher: TokenMatcher | None
) -> FinishReason | None:
    """Whether this token ends its choice; the matcher, if there is one, takes it in.

    num_generated  generated tokens, this one included
    A whole structure to which nothing can be added ends the text before min_tokens, and is said rather than `length`.
    Raises RowFailed if the token can't follow.
    """
    reason = finish_reason(key, token_id, num_generated)
    if matcher is None or reason in (FinishReason.EOS, FinishReason.STOP_TOKEN):
        return reason
    matcher.take(token_id)
    return FinishReason.STRUCTURE if matcher.is_complete else reason
