"""The model's tokenizer in the router: where it comes from, and texts and chats of requests made into ids."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import structlog

from pdserve.chat import read_chat
from pdserve.children.frames import RenderChat
from pdserve.children.renderer import ChatRenderer
from pdserve.errors import Incompatible, InvalidRequest, NoWorker, too_large
from pdserve.messages import Hello, TokenizerFile
from pdserve.request import Chat, Limits
from pdserve.steps import Steps, at_once, finish
from pdserve.tokenizer import Tokenizer
from router.turns import Turns
from router.work import Work

log = structlog.get_logger()

INLINE_CHARACTERS = 2_000  # shorter texts are encoded in less time than a thread needs to be woken


class ModelText:
    """The tokenizer, once there is one. Event-loop thread only.

    work       where a tokenizer's files are read
    turns      where requests' texts are
    renderer   writes chats by the model's template
    tokenizer  given at start: then workers with another one aren't taken in; or None: the first worker sends its files
    prepare    awaited with one that a worker has sent, before anybody gets it
    on_loaded  called when anybody gets it from now on
    """

    def __init__(
        self, work: Work, turns: Turns, renderer: ChatRenderer, tokenizer: Tokenizer | None = None
    ) -> None:
        self._work = work
        self._turns = turns
        self._renderer = renderer
        self._tokenizer = tokenizer
        self._fingerprint = tokenizer.fingerprint if tokenizer is not None else ""
        self._is_own = tokenizer is not None
        self._arriving: dict[str, dict[str, bytes]] = {}  # by sender, then by file name
        self._expected = self._fingerprint  # of the workers that are here, or were here last
        self._loaded = asyncio.Event()
        self._loading = asyncio.Lock()
        self.prepare: Callable[[Tokenizer], Awaitable[None]] = _nothing
        self.on_loaded: Callable[[], None] = lambda: None
        if tokenizer is not None:
            self._loaded.set()

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Of the model that is served."""
        return self._tokenizer

    def wants(self, hello: Hello) -> bool:
        """Whether this worker must send its tokenizer files. Raises Incompatible if the router's own is another."""
        if self._is_own and self._fingerprint != hello.tokenizer_fingerprint:
            raise Incompatible(
                "worker's tokenizer_fingerprint differs from that of router.model",
                field="tokenizer_fingerprint",
                worker=hello.worker.id,
                theirs=hello.tokenizer_fingerprint,
                ours=self._fingerprint,
            )
        return self._tokenizer is None or self._fingerprint != hello.tokenizer_fingerprint

    def expect(self, fingerprint: str) -> None:
        """A worker with this tokenizer has been taken in; another one, of workers that have left, serves nobody now."""
        self._expected = fingerprint
        if self._tokenizer is not None and self._fingerprint != fingerprint:
            self._tokenizer, self._fingerprint = None, ""
            self._loaded.clear()

    def add_file(self, sender: str, file: TokenizerFile) -> dict[str, bytes] | None:
        """One file of a tokenizer, by a worker that was asked.

        returns  all files of that worker with the last one, for `load`
        """
        files = self._arriving.setdefault(sender, {})
        files[file.name] = file.content
        return self._arriving.pop(sender) if file.last else None

    async def load(self, files: Mapping[str, bytes], fingerprint: str) -> None:
        """Make the tokenizer of a worker's files the one in use, unless it is already. Raises Incompatible.

        Reading a large vocabulary holds the interpreter for a second, so it is done once, and nobody is served before.
        """
        async with self._loading:
            if fingerprint != self._expected or self._fingerprint == fingerprint:
                return  # another worker was quicker, or workers of another model have come meanwhile
            tokenizer = await self._work.run(lambda: Tokenizer.from_files(files))
            await self.prepare(tokenizer)
            if fingerprint != self._expected:
                return
            self._tokenizer, self._fingerprint = tokenizer, fingerprint
            self._loaded.set()
        log.info("tokenizer.loaded", fingerprint=fingerprint, vocab_size=tokenizer.vocab_size)
        self.on_loaded()

    @property
    def is_loading(self) -> bool:
        """Whether one has arrived and is being read."""
        return self._loading.locked()

    def forget(self, sender: str) -> None:
        """That worker's session has ended: drop what it has sent of its files."""
        self._arriving.pop(sender, None)

    async def get(self, wait_s: float) -> Tokenizer:
        """The tokenizer; waits for the first worker. Raises NoWorker after wait_s."""
        try:
            async with asyncio.timeout(wait_s):
                await self._loaded.wait()
        except TimeoutError:
            raise NoWorker("no worker has joined that knows the model", waited_s=wait_s) from None
        assert self._tokenizer is not None
        return self._tokenizer

    async def encode(
        self, tokenizer: Tokenizer, source: str | Chat, limits: Limits, *, user: str, keep: int | None = None
    ) -> tuple[int, ...]:
        """Ids of a text, or of a chat by the model's template.

        user  whose turn it takes
        keep  only the last so many ids
        Raises InvalidRequest, for a text that can't fit the window before it is read; Overloaded.
        """
        if keep is not None and limits.window_tokens is not None and keep >= limits.window_tokens:
            keep = None  # what is cut there leaves no room for an answer: it is refused as if it weren't cut
        if isinstance(source, str):
            steps = _encoding(tokenizer, source, limits, keep)
            if len(source) <= INLINE_CHARACTERS:
                return finish(steps)
            return await self._turns.run(steps, user=user, num_bytes=len(source))
        preparing = _prepared(tokenizer, source, limits, keep)
        job, mark = await self._turns.run(preparing, user=user, num_bytes=source.num_characters)
        text = await self._renderer.render(job, user)
        encoding = _encoding_rendered(tokenizer, text, mark, limits, keep)
        return await self._turns.run(encoding, user=user, num_bytes=len(text))

    async def bad_word_ids(
        self, tokenizer: Tokenizer, words: Sequence[str], *, user: str
    ) -> tuple[tuple[int, ...], ...]:
        """How the model may write these words: at the beginning of a text, and behind a space. docs/sampling.md.

        Raises InvalidRequest for a word that the tokenizer has no ids for.
        """
        if not words:
            return ()
        return await self._turns.run(
            at_once(lambda: _bad_word_ids(tokenizer, words)), user=user, num_bytes=sum(map(len, words))
        )

    async def decode(self, tokenizer: Tokenizer, token_ids: Sequence[int], *, user: str) -> str:
        """Text of ids, special tokens included."""
        steps = at_once(lambda: tokenizer.decode(token_ids, skip_special_tokens=False))
        return await self._turns.run(steps, user=user, num_bytes=len(token_ids))

    async def token_bytes(self, tokenizer: Tokenizer, token_ids: Sequence[int], *, user: str) -> list[bytes]:
        """How each of these tokens is written by itself; ids that are none give nothing."""
        if "spelled" not in tokenizer.__dict__:  # of a large vocabulary it takes a second
            steps = at_once(lambda: tokenizer.spelled)
            await self._turns.run(steps, user=user, num_bytes=tokenizer.vocab_size)
        spelled = tokenizer.spelled
        return [spelled[token_id] if 0 <= token_id < len(spelled) else b"" for token_id in token_ids]


async def _nothing(tokenizer: Tokenizer) -> None:
    """Nothing is to be prepared."""


def _bad_word_ids(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    found: dict[tuple[int, ...], None] = {}  # in order, each once
    for word in words:
        bare = word.strip()
        spelled = [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (bare, f" {bare}")]
        if not all(spelled):
            raise InvalidRequest("a bad word has no tokens", value=word)
        found.update(dict.fromkeys(spelled))
    return tuple(found)


def _encoding(tokenizer: Tokenizer, text: str, limits: Limits, keep: int | None) -> Steps[tuple[int, ...]]:
    if keep is None:
        _check_length("text", text, tokenizer, limits)
    return tuple((yield from tokenizer.encode_steps(text, keep=keep)))


def _prepared(
    tokenizer: Tokenizer, chat: Chat, limits: Limits, keep: int | None
) -> Steps[tuple[RenderChat, str]]:
    """What a child is to do, and the mark for what it writes."""
    if keep is None:
        for place, message in enumerate(chat.messages):
            _check_length(f"messages[{place}].content", message.content, tokenizer, limits)
    messages, tools, variables = read_chat(chat)
    yield
    marked: Sequence[Mapping[str, Any]] = messages
    mark = ""
    if not chat.parse_special_tokens:
        marked, mark = tokenizer.mark_chat(messages)
        yield
    asked = {
        "messages": marked,
        "tools": tools,
        "add_generation_prompt": chat.opens_turn,
        "continue_final_message": chat.continue_final_message,
        "variables": variables,
    }
    return RenderChat(tokenizer.chat_template(tools), tokenizer.special_tokens, json.dumps(asked)), mark


def _encoding_rendered(
    tokenizer: Tokenizer, text: str, mark: str, limits: Limits, keep: int | None
) -> Steps[tuple[int, ...]]:
    if keep is None:
        _check_length("the chat's text", text, tokenizer, limits)
    return tuple((yield from tokenizer.encode_rendered(text, mark, keep=keep)))


def _check_length(name: str, text: str, tokenizer: Tokenizer, limits: Limits) -> None:
    """Raises InvalidRequest for more than the longest tokens could say in the window."""
    window_tokens = limits.window_tokens
    if window_tokens is None or len(text) <= window_tokens:
        return
    longest = tokenizer.longest_token_bytes
    if longest is not None and (size := len(text.encode())) > window_tokens * longest:
        raise too_large(
            "text",
            f"{name} can't fit the window",
            limit_bytes=window_tokens * longest,
            value=size,
            window_tokens=window_tokens,
            longest_token_bytes=longest,
        )
