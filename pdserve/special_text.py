"""Special tokens that a user writes: text, not tokens.

What a user or a tool says must not end a turn or begin another one. So before the template writes the conversation,
each place in such a message where a special token could begin gets a mark, and what is marked is encoded as plain text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise, takewhile
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers

from pdserve.errors import InvalidRequest
from pdserve.steps import Steps
from pdserve.text_pieces import TextPieces

UNTRUSTED_ROLES = ("user", "tool")
_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # no characters: for a program's own use


class SpecialText:
    """Of one tokenizer. Any thread may call.

    special  special tokens as they are written
    window   characters that one call of a regex looks through, which holds the interpreter
    """

    def __init__(self, backend: Backend, special: Sequence[str], window: int = 65_536) -> None:
        self._backend = backend
        self._heads = {token[0] for token in special}
        self._tokens = _any_of(sorted(special)) if special else "(?!)"
        self._begins = re.compile(f"(?={self._tokens})")
        self._window = window
        self._longest = max(map(len, special), default=0)
        self._pre_tokenizer = _behind_a_token(backend.pre_tokenizer)

    def mark(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], str]:
        """The messages, marked where untrusted ones could write special tokens; and the mark, "" if none does."""
        if not any(self._is_marked(each) for each in messages if each.get("role") in UNTRUSTED_ROLES):
            return list(messages), ""
        mark = _unused(messages)
        return [
            {key: value if key == "role" else self._marked(value, mark) for key, value in each.items()}
            if each.get("role") in UNTRUSTED_ROLES
            else each
            for each in messages
        ], mark

    def encode(self, text: str, mark: str, pieces: TextPieces) -> Steps[list[int]]:
        """Ids of a text in which this mark stands before what only looks like a special token."""
        ids: list[int] = []
        run, begin = "", 0  # what is encoded as usual
        tokens = re.compile(f"(?<!{mark})(?:{self._tokens})")
        for token in [*self._scan(tokens, text), None]:
            stretch = text[begin : len(text) if token is None else token.start()]
            if mark in stretch:
                ids += yield from pieces.encode(run, self._usual)
                ids += yield from pieces.encode(stretch.replace(mark, ""), self._plain)
                run = ""
            else:
                run += stretch
            if token is not None:
                run += token[0]
                begin = token.end()
        return ids + (yield from pieces.encode(run, self._usual))

    def _scan(self, pattern: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
        """`finditer` of special tokens, in calls that don't take long."""
        at = 0
        while at < len(text):
            end = at + self._window
            for found in pattern.finditer(text, at, end + self._longest):
                if found.start() >= end:
                    break
                yield found
                end = max(end, found.end())
            at = end

    def _usual(self, text: str) -> list[int]:
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
        return list(encoding.ids)

    def _plain(self, text: str) -> list[int]:
        """As the backend does it, without looking for special tokens."""
        if self._backend.normalizer is not None:
            text = self._backend.normalizer.normalize_str(text)
        words = [text]
        if self._pre_tokenizer is not None:
            words = [word for word, _ in self._pre_tokenizer.pre_tokenize_str(text)]
        return [token.id for word in words for token in self._backend.model.tokenize(word)]

    def _is_marked(self, value: Any) -> bool:
        if isinstance(value, str):
            return any(head in value for head in self._heads) and any(self._scan(self._begins, value))
        if isinstance(value, Mapping):
            return any(map(self._is_marked, value.values()))
        return isinstance(value, list | tuple) and any(map(self._is_marked, value))

    def _marked(self, value: Any, mark: str) -> Any:
        if isinstance(value, str):
            begins = [0, *(found.start() for found in self._scan(self._begins, value)), len(value)]
            return mark.join(value[begin:end] for begin, end in pairwise(begins))
        if isinstance(value, Mapping):
            return {key: self._marked(item, mark) for key, item in value.items()}
        return [self._marked(item, mark) for item in value] if isinstance(value, list | tuple) else value


def _unused(messages: Sequence[Mapping[str, Any]]) -> str:
    written = json.dumps(messages, ensure_ascii=False)
    for mark in _MARKS:
        if mark not in written:
            return mark
    raise InvalidRequest("chat messages hold special tokens and all of U+FDD0 to U+FDEF")


def _any_of(words: Sequence[str]) -> str:
    """A regex of these sorted texts; the longest counts where several begin alike. Many take no more time than one."""
    parts = []
    for _, group in groupby(filter(None, words), key=lambda word: word[0]):
        alike = list(group)
        head = _common_head(alike[0], alike[-1])
        parts.append(re.escape(head) + _any_of([word[len(head) :] for word in alike]))
    if not parts:
        return ""
    return f"(?:{'|'.join(parts)}){'' if words[0] else '?'}"


def _common_head(one: str, other: str) -> str:
    return "".join(
        char for char, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    )


def _behind_a_token(pre_tokenizer: Any) -> Any:
    """The same where it puts a space before the first text only: a stretch behind a token isn't that."""
    if pre_tokenizer is None:
        return None
    state = json.loads(pre_tokenizer.__getstate__())
    if state.get("type") == "Metaspace" and state.get("prepend_scheme") == "first":
        return pre_tokenizers.Metaspace(
            replacement=state["replacement"], prepend_scheme="never", split=bool(state.get("split", True))
        )
    return pre_tokenizer
