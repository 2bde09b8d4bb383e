"""The token matcher port by brute force: a structure with few texts is a list of them."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.errors import RowFailed
from pdserve.token_mask import TokenMask, to_mask


class ListMatcher:
    """texts: all that there are; tokens: bytes of each id; ends: ids that may follow a whole text."""

    def __init__(self, texts: Sequence[bytes], tokens: Sequence[bytes], ends: Sequence[int]) -> None:
        self._texts = texts
        self._tokens = tokens
        self._ends = ends
        self._ids: dict[bytes, list[int]] = {}
        for token_id, token in enumerate(tokens):
            self._ids.setdefault(token, []).append(token_id)
        self.text = b""

    @property
    def is_complete(self) -> bool:
        return self.text in self._texts and not any(self._begins(text, self.text) for text in self._texts)

    @property
    def allowed(self) -> list[int]:
        """Ids that may follow, the ends not among them."""
        rests = [text[len(self.text) :] for text in self._texts if text.startswith(self.text)]
        starts = {rest[:length] for rest in rests for length in range(1, len(rest) + 1)}
        found = (token_id for start in starts for token_id in self._ids.get(start, ()))
        return sorted(token_id for token_id in found if token_id not in self._ends)

    def mask(self) -> TokenMask:
        ends = self._ends if self.text in self._texts else ()
        return to_mask([*self.allowed, *ends], max(len(self._tokens), *self._ends, 0) + 1)

    def take(self, token_id: int) -> None:
        if token_id not in self.allowed:
            raise RowFailed("a token that no text has here", token_id=token_id)
        self.text += self._tokens[token_id]

    def _begins(self, text: bytes, start: bytes) -> bool:
        return len(text) > len(start) and text.startswith(start)
