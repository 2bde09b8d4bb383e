"""The prompt as the client gets it, in parts that fit into a message."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.request import Prompt
from pdserve.sampling import TokenLogprobs

PART_TOKENS = 1024  # with 20 logprobs a token about 250 KB


def prompt_parts(prompt_ids: Sequence[int], text: str, scores: Sequence[TokenLogprobs]) -> list[Prompt]:
    """text: "" without echo; scores: none, or of all tokens from index 1 on."""
    return [
        Prompt(
            first_index=first,
            token_ids=tuple(prompt_ids[first : first + PART_TOKENS]),
            text="" if first else text,
            logprobs=tuple(scores[max(first - 1, 0) : first - 1 + PART_TOKENS]),
        )
        for first in range(0, len(prompt_ids), PART_TOKENS)
    ]
