"""Text and chats ↔ token ids, from the files of a model folder (no torch, no transformers)."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from pdserve.chat_template import ChatTemplate, plain_messages
from pdserve.clock import Clock, SystemClock
from pdserve.detokenizer import TextStream
from pdserve.errors import Incompatible, InvalidRequest
from pdserve.fake_tokenizer import fake_files
from pdserve.special_text import SpecialText
from pdserve.steps import Steps, finish
from pdserve.text_pieces import PIECE_CHARACTERS, TextPieces
from pdserve.token_text import token_text
from pdserve.tokenizer_files import (
    eos_token_ids,
    json_of,
    load_backend,
    named_tokens,
    read_files,
    template_sources,
)


class Tokenizer:
    """The tokenizer of one model. Immutable after loading; any thread may call (streams have one owner each).

    files             what it was made of, by name: a worker sends them to a router that has no model folder
    fingerprint       BLAKE2b-128 over the files, hex: equal on both sides of a pair
    vocab_size        number of tokens
    highest_token_id  where ids have gaps, this is more than vocab_size - 1; the model may have fewer embeddings
    special_ids       tokens that give no text
    chat_templates    sources by name; the usual one is `default`
    """

    def __init__(self, files: Mapping[str, bytes], clock: Clock) -> None:
        self.files: dict[str, bytes] = {name: files[name] for name in sorted(files)}
        self.fingerprint = _fingerprint(self.files)
        self._named = named_tokens(self.files)
        self._backend = load_backend(self.files)
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._special_text = SpecialText(
            self._backend, [token.content for token in added.values() if token.special]
        )
        self._text = token_text(self._backend, self.special_ids)
        self.vocab_size = self._backend.get_vocab_size(with_added_tokens=True)
        plain_size = self._backend.get_vocab_size(with_added_tokens=False)
        self.highest_token_id = max([plain_size - 1, *added])
        self.eos_token_ids = eos_token_ids(self.files, self._backend)
        self.chat_templates = template_sources(self.files)
        self._clock = clock

    @classmethod
    def load(cls, folder: Path, clock: Clock | None = None) -> Self:
        """Read a model folder.

        Ids that the model, by its config.json, has no embedding for end no text. Raises UnknownModel or Incompatible,
        naming the file; Incompatible also if all ends are such ids.
        """
        tokenizer = cls(read_files(folder), clock or SystemClock())
        tokenizer._drop_ends_outside(folder)
        return tokenizer

    @classmethod
    def from_files(cls, files: Mapping[str, bytes], clock: Clock | None = None) -> Self:
        """From the files that a worker sent. Raises as `load`."""
        return cls(files, clock or SystemClock())

    @classmethod
    def fake(cls, vocab_size: int = 260, clock: Clock | None = None) -> Self:
        """For the fake engine: ids 0–255 are the bytes, 256 is `<|eos|>`, further ones read `<257>` and so on."""
        return cls.from_files(fake_files(vocab_size), clock)

    @property
    def has_chat_template(self) -> bool:
        """Whether chats can be rendered."""
        return bool(self.chat_templates)

    @property
    def special_tokens(self) -> dict[str, str]:
        """The named tokens of the model, e.g. bos_token, as templates see them."""
        return dict(self._named)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text; by default with what the model puts around texts (begin of sequence, mostly).

        Special tokens written out in the text become their ids, as everywhere in the field.
        """
        if len(text) <= PIECE_CHARACTERS:
            return self._encode_at_once(text, add_special_tokens)
        return finish(self.encode_steps(text, add_special_tokens=add_special_tokens))

    def encode_steps(
        self, text: str, *, add_special_tokens: bool = True, keep: int | None = None
    ) -> Steps[list[int]]:
        """As `encode`, in steps. keep: only the last so many ids, for which no more of the text is read than needed.

        Raises InvalidRequest for a text with a stretch of MAX_UNCUT_CHARACTERS without the end of a word.
        """
        head, tail = self._around if add_special_tokens else ([], [])
        if keep is None:
            return [*head, *(yield from self._pieces.encode(text, self._encode_plain)), *tail]
        ids, is_all = yield from self._pieces.encode_end(text, keep, self._encode_plain)
        return [*(head if is_all else ()), *ids, *tail][-keep:]

    def _encode_plain(self, text: str) -> list[int]:
        return self._encode_at_once(text, add_special_tokens=False)

    def _encode_at_once(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            # A batch of one: only batches release the interpreter.
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return list(encoding.ids)
        except (TypeError, UnicodeError) as error:
            raise InvalidRequest("text is not valid Unicode") from error

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """What the model puts before a text and behind it."""
        bare, whole = self._encode_at_once("a", False), self._encode_at_once("a", True)
        begin = next(at for at in range(len(whole) + 1) if whole[at : at + len(bare)] == bare)
        return whole[:begin], whole[begin + len(bare) :]

    @cached_property
    def _pieces(self) -> TextPieces:
        return TextPieces(self.spelled)

    @cached_property
    def spelled(self) -> list[bytes]:
        """How each token is written, also where that isn't just its bytes. Made when it is first asked for: up to a
        second."""
        try:
            return self.token_bytes()
        except InvalidRequest:
            tokens = [self._backend.id_to_token(token_id) for token_id in range(self.highest_token_id + 1)]
            return [(token or "").replace("\u2581", " ").encode() for token in tokens]

    @cached_property
    def longest_token_bytes(self) -> int | None:
        """Most UTF-8 bytes of a text that one token can stand for; None = any number."""
        shrinks = (
            _shrinks(json.loads(self._backend.normalizer.__getstate__())) if self._backend.normalizer else 1
        )
        try:
            longest = max(map(len, self.token_bytes()))
        except InvalidRequest:
            return None
        return None if shrinks is None else longest * shrinks

    def chat_template(self, tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """The source of the template for a chat with these tools. Raises InvalidRequest if there is none."""
        if not self.chat_templates:
            raise InvalidRequest("this model has no chat template: send text or token ids")
        name = "tool_use" if tools and "tool_use" in self.chat_templates else "default"
        source = self.chat_templates.get(name)
        if source is None:
            raise InvalidRequest(
                "this model has no default chat template", templates=", ".join(self.chat_templates)
            )
        return source

    def mark_chat(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], str]:
        """A chat whose users and tools write only text, whatever it looks like; and the mark for `encode_rendered`.

        Raises InvalidRequest for messages that hold more than JSON.
        """
        return self._special_text.mark(plain_messages(messages))

    def encode_rendered(self, text: str, mark: str = "", *, keep: int | None = None) -> Steps[list[int]]:
        """Ids of what a template has written, in steps. It writes special tokens itself, so none are put around.

        mark  of `mark_chat`; "" = special tokens count, whoever wrote them
        keep  only the last so many ids
        """
        if not mark:
            return (yield from self.encode_steps(text, add_special_tokens=False, keep=keep))
        ids = yield from self._special_text.encode(text, mark, self._pieces)
        return ids if keep is None else ids[-keep:]

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **how: Any,
    ) -> str:
        """The prompt text of a chat by the model's own template, as `ChatTemplate.render` writes it.

        Here, without limits: a router has it done by a child (pdserve/children/renderer.py).
        Raises InvalidRequest saying what is wrong.
        """
        template = ChatTemplate(self.chat_template(tools), self._named, self._clock)
        return template.render(messages, tools, **how)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        parse_special_tokens: bool = False,
        **how: Any,
    ) -> list[int]:
        """Ids of a chat, rendered as by `render_chat`.

        parse_special_tokens  those that a user or a tool has written count as well; else they are text
        """
        marked, mark = (messages, "") if parse_special_tokens else self.mark_chat(messages)
        return finish(self.encode_rendered(self.render_chat(marked, tools, **how), mark))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids, all at once; ids outside the vocabulary give no text."""
        return self._text.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self) -> list[bytes]:
        """What each id, from 0 to the highest, adds to a text's bytes; of special tokens, how they are written.

        Raises InvalidRequest if this tokenizer's tokens aren't bytes, put one behind the other.
        """
        found = self._text.token_bytes(self.highest_token_id + 1)
        for token_id in self.special_ids:
            found[token_id] = (self._backend.id_to_token(token_id) or "").encode()
        return found

    def stream(self, *, skip_special_tokens: bool = True) -> TextStream:
        """A new incremental detokenizer."""
        return self._text.stream(skip_special_tokens=skip_special_tokens)

    def _drop_ends_outside(self, folder: Path) -> None:
        # Here, so that a router without a model of its own starts without the model store.
        from pdserve.modelstore.text_config import text_config

        path = folder / "config.json"
        if not path.is_file():
            return
        size = text_config(json_of({path.name: path.read_bytes()}, path.name)).get("vocab_size")
        if not isinstance(size, int):
            return
        ends = self.eos_token_ids
        self.eos_token_ids = tuple(token_id for token_id in ends if token_id < size)
        if ends and not self.eos_token_ids:
            raise Incompatible(
                "all end-of-sequence ids are outside the model's vocabulary",
                eos_token_id=max(ends),
                vocab_size=size,
                folder=folder,
            )


def _shrinks(normalizer: Mapping[str, Any]) -> int | None:
    """How many bytes of a text a normalizer may make one of; None = any number."""
    match normalizer:
        case {"type": "Sequence", "normalizers": [*parts]}:
            factors = [_shrinks(part) for part in parts]
            return None if None in factors else math.prod(factor for factor in factors if factor)
        case {"type": "NFC" | "NFD" | "NFKC" | "NFKD"}:
            return 4  # a letter of four bytes may become one of ASCII
        case {"type": "Prepend"}:
            return 1
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if len(new) >= len(
            old
        ):
            return 1
        case _:
            return None


def _fingerprint(files: Mapping[str, bytes]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, content in files.items():
        for part in (name.encode(), content):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.hexdigest()
