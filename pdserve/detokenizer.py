"""Token ids → text, piece by piece: what comes out, put together, is the text of all ids at once."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Sequence
from typing import Protocol

from tokenizers import Tokenizer as Backend

_INCOMPLETE = "\ufffd"
_MOST_HELD = 8  # ids; a UTF-8 character has at most four bytes, so more can't become one
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Where "surrogateescape" leaves a byte that belongs to no character.
_BROKEN = {0xDC00 + byte: _INCOMPLETE for byte in range(0x80, 0x100)}


class TextStream(Protocol):
    """Text of one growing list of ids. One owner; not shared between threads."""

    def step(self, token_ids: Sequence[int]) -> str:
        """Take in the next ids and give the text that is certain now, perhaps none.

        Ids outside the vocabulary give no text, nor do special tokens unless the stream was made to show them.
        """
        ...

    def flush(self) -> str:
        """What was held back, at the end of the ids."""
        ...


class ByteTable:
    """Bytes of each token of a tokenizer whose text is its tokens' bytes, one after the other.

    Shared by the streams of a tokenizer, filled on demand. Any thread may read: entries are set once and always to the
    same value.
    """

    def __init__(self, backend: Backend, spell: Callable[[str], bytes], hidden_ids: frozenset[int]) -> None:
        """spell: bytes of a token as the vocabulary writes it. hidden_ids: tokens that give no text."""
        self._backend = backend
        self._spell = spell
        self._hidden_ids = hidden_ids
        self._table: dict[int, bytes] = {}

    def bytes_of(self, token_id: int) -> bytes:
        """What a token adds to the text, before UTF-8 decoding; b"" for hidden and unknown ids."""
        found = self._table.get(token_id)
        if found is None:
            found = self._table[token_id] = self._look_up(token_id)
        return found

    def join(self, token_ids: Sequence[int]) -> bytes:
        """The same for a run of them."""
        return b"".join([self.bytes_of(token_id) for token_id in token_ids])

    def _look_up(self, token_id: int) -> bytes:
        if token_id in self._hidden_ids or token_id < 0:
            return b""
        token = self._backend.id_to_token(token_id)
        return b"" if token is None else self._spell(token)


class ByteStream:
    """Stream of a byte-level tokenizer: holds back only an incomplete UTF-8 character."""

    def __init__(self, table: ByteTable) -> None:
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def step(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(self._table.join(token_ids))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class PieceStream:
    """Stream of a SentencePiece tokenizer: as ByteStream, with that kind's rules for broken bytes and first spaces.

    Each byte that belongs to no character becomes one U+FFFD, and characters around it stay (`piece_text`).
    """

    def __init__(self, table: ByteTable, *, strips_first_space: bool) -> None:
        self._table = table
        self._strips = strips_first_space
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")

    def step(self, token_ids: Sequence[int]) -> str:
        return self._shown(self._decoder.decode(self._table.join(token_ids)))

    def flush(self) -> str:
        return self._shown(self._decoder.decode(b"", final=True))

    def _shown(self, text: str) -> str:
        if self._strips and text:
            self._strips = False
            text = text.removeprefix(" ")
        return text.translate(_BROKEN)


def piece_text(content: bytes, *, strips_first_space: bool) -> str:
    """Text of all bytes of a SentencePiece tokenizer at once.

    As SentencePiece itself: a byte that belongs to no character becomes U+FFFD. (The `tokenizers` package, and with it
    transformers, gives up a whole run of byte tokens if one byte in it is broken; then no character could be shown
    before its run ends.)
    """
    text = content.decode("utf-8", "surrogateescape")
    return (text.removeprefix(" ") if strips_first_space else text).translate(_BROKEN)


def byte_level_bytes(token: str) -> bytes:
    """Bytes of a token of a byte-level vocabulary."""
    try:
        return bytes([_BYTE_OF[char] for char in token])
    except KeyError:  # an added token, spelled as it reads
        return token.encode()


def piece_bytes(token: str) -> bytes:
    """Bytes of a token of a SentencePiece vocabulary: `<0x41>` is a byte, ▁ a space."""
    if len(token) == 6 and (match := _BYTE_PIECE.fullmatch(token)):
        return bytes([int(match[1], 16)])
    return token.replace("\u2581", " ").encode()


class WindowStream:
    """Stream of any other tokenizer: decodes a short window of the last ids with and without the new ones.

    Decoders of this kind (word pieces, a stripped first space) look at neighbours, so a window of two steps is decoded;
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


_BYTE_OF = {spelled: byte for byte, spelled in enumerate(byte_spelling())}
