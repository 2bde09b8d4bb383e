"""Token ids → text, piece by piece: what comes out, put together, is the text of all ids at once."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

from tokenizers import Tokenizer as Backend

_INCOMPLETE = "\ufffd"
_MOST_HELD = 8  # ids; a UTF-8 character has at most four bytes, so more can't become one


class TextStream(Protocol):
    """Text of one growing list of ids. One owner; not shared between threads."""

    def step(self, token_ids: Sequence[int]) -> str:
        """Take in the next ids and give the text that is certain now, perhaps none.

        Special tokens and ids outside the vocabulary give no text.
        """
        ...

    def flush(self) -> str:
        """What was held back, at the end of the ids."""
        ...


class ByteTable:
    """Bytes of each token of a byte-level tokenizer; shared by the streams of a tokenizer, filled on demand.

    Any thread may read: entries are set once and always to the same value.
    """

    def __init__(self, backend: Backend, special_ids: frozenset[int]) -> None:
        self._backend = backend
        self._special_ids = special_ids
        self._bytes_of = {spelled: byte for byte, spelled in enumerate(byte_spelling())}
        self._table: dict[int, bytes] = {}

    def bytes_of(self, token_id: int) -> bytes:
        """What a token adds to the text, before UTF-8 decoding; b"" for special and unknown ids."""
        found = self._table.get(token_id)
        if found is None:
            found = self._table[token_id] = self._look_up(token_id)
        return found

    def _look_up(self, token_id: int) -> bytes:
        if token_id in self._special_ids or token_id < 0:
            return b""
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        try:
            return bytes(self._bytes_of[char] for char in token)
        except KeyError:  # an added token, spelled as it reads
            return token.encode()


class ByteStream:
    """Stream of a byte-level tokenizer: holds back only an incomplete UTF-8 character."""

    def __init__(self, table: ByteTable) -> None:
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def step(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(b"".join([self._table.bytes_of(token_id) for token_id in token_ids]))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowStream:
    """Stream of any other tokenizer: decodes a short window of the last ids with and without the new ones.

    Decoders of this kind (byte fallback, stripped first space) look at neighbours, so a window of two steps is decoded;
    text that ends in U+FFFD is held back for a few ids, because the next one may complete the character.
    """

    def __init__(self, decode: Callable[[list[int]], str], is_visible: Callable[[int], bool]) -> None:
        self._decode = decode
        self._is_visible = is_visible
        self._window: list[int] = []
        self._num_shown = 0  # leading ids of the window whose text is out

    def step(self, token_ids: Sequence[int]) -> str:
        return "".join([self._one(token_id) for token_id in token_ids if self._is_visible(token_id)])

    def flush(self) -> str:
        text = self._decode(self._window)[len(self._shown()) :]
        self._num_shown = len(self._window)
        return text

    def _one(self, token_id: int) -> str:
        self._window.append(token_id)
        shown = self._shown()
        text = self._decode(self._window)
        num_held = len(self._window) - self._num_shown
        if num_held < _MOST_HELD and (len(text) <= len(shown) or text.endswith(_INCOMPLETE)):
            return ""
        self._window = self._window[self._num_shown :]
        self._num_shown = len(self._window)
        return text[len(shown) :]

    def _shown(self) -> str:
        return self._decode(self._window[: self._num_shown])


def byte_spelling() -> list[str]:
    """How byte-level BPE spells each of the 256 bytes: printable ones as themselves, the rest from U+0100 on.

    Source: GPT-2's encoder, `bytes_to_unicode`.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    spelling = [""] * 256
    for byte in printable:
        spelling[byte] = chr(byte)
    others = 0
    for byte in range(256):
        if not spelling[byte]:
            spelling[byte] = chr(0x100 + others)
            others += 1
    return spelling
