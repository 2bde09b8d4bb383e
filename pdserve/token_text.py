"""How a tokenizer turns ids into text: all at once, and as they come."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

from tokenizers import Tokenizer as Backend

from pdserve.detokenizer import (
    ByteStream,
    ByteTable,
    PieceStream,
    TextStream,
    WindowStream,
    byte_level_bytes,
    piece_bytes,
    piece_text,
)
from pdserve.errors import InvalidRequest

_HIGHEST_ID = (1 << 32) - 1
_PIECES = [
    {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
_STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


class TokenText(Protocol):
    """One per tokenizer; any thread may call. What streams of it say, put together, equals `decode` of all ids."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of ids; ids outside the vocabulary give none. Raises InvalidRequest for what is no id."""
        ...

    def stream(self, *, skip_special_tokens: bool) -> TextStream:
        """A new stream."""
        ...

    def token_bytes(self, count: int) -> list[bytes]:
        """What ids 0 to count − 1 add to a text, b"" for special and unknown ones; the text is these, joined.

        Raises InvalidRequest if what a token adds depends on its neighbours.
        """
        ...


def token_text(backend: Backend, special_ids: frozenset[int]) -> TokenText:
    """By what the tokenizer's decoder does."""
    state: dict[str, Any] = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}
    if state.get("type") == "ByteLevel":
        return ByteLevelText(backend, special_ids)
    steps = state.get("decoders") if state.get("type") == "Sequence" else None
    if steps in (_PIECES, [*_PIECES, _STRIP]):
        return PieceText(backend, special_ids, strips_first_space=_STRIP in steps)
    return OtherText(backend, special_ids)


class ByteLevelText:
    """GPT-2's kind: tokens are bytes, spelled as printable characters."""

    def __init__(self, backend: Backend, special_ids: frozenset[int]) -> None:
        self._backend = backend
        self._visible = ByteTable(backend, byte_level_bytes, special_ids)
        self._all = ByteTable(backend, byte_level_bytes, frozenset())

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return _decoded(self._backend, token_ids, skip_special_tokens)

    def stream(self, *, skip_special_tokens: bool) -> TextStream:
        return ByteStream(self._visible if skip_special_tokens else self._all)

    def token_bytes(self, count: int) -> list[bytes]:
        return [self._visible.bytes_of(token_id) for token_id in range(count)]


class PieceText:
    """SentencePiece's kind: characters, ▁ for spaces, single bytes where no token fits."""

    def __init__(self, backend: Backend, special_ids: frozenset[int], *, strips_first_space: bool) -> None:
        self._visible = ByteTable(backend, piece_bytes, special_ids)
        self._all = ByteTable(backend, piece_bytes, frozenset())
        self._strips = strips_first_space

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        if not all(0 <= token_id <= _HIGHEST_ID for token_id in token_ids):
            raise InvalidRequest("token ids are integers from 0 to 2^32 - 1")
        table = self._visible if skip_special_tokens else self._all
        return piece_text(table.join(token_ids), strips_first_space=self._strips)

    def stream(self, *, skip_special_tokens: bool) -> TextStream:
        table = self._visible if skip_special_tokens else self._all
        return PieceStream(table, strips_first_space=self._strips)

    def token_bytes(self, count: int) -> list[bytes]:
        return [self._visible.bytes_of(token_id) for token_id in range(count)]


class OtherText:
    """Any other decoder: word pieces, plain words, ▁ by position."""

    def __init__(self, backend: Backend, special_ids: frozenset[int]) -> None:
        self._backend = backend
        self._special_ids = special_ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return _decoded(self._backend, token_ids, skip_special_tokens)

    def stream(self, *, skip_special_tokens: bool) -> TextStream:
        hidden = self._special_ids if skip_special_tokens else frozenset()
        return WindowStream(
            lambda token_ids: _decoded(self._backend, token_ids, skip_special_tokens),
            lambda token_id: token_id not in hidden,
        )

    def token_bytes(self, count: int) -> list[bytes]:
        raise InvalidRequest(
            "structured output needs a tokenizer whose tokens are bytes; this model's isn't one"
        )


def _decoded(backend: Backend, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
    try:
        # A batch of one: only batches release the interpreter.
        (text,) = backend.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)
        return str(text)
    except (OverflowError, TypeError) as error:
        raise InvalidRequest("token ids are integers from 0 to 2^32 - 1") from error
