"""The model's tokenizer in the router: where it comes from, and work with it that never holds up the loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

import structlog

from pdserve.errors import Incompatible, InvalidRequest, NoWorker
from pdserve.messages import Hello, TokenizerFile
from pdserve.request import Chat
from pdserve.tokenizer import Tokenizer

log = structlog.get_logger()

T = TypeVar("T")
INLINE_CHARACTERS = 2_000  # shorter texts are encoded in less time than a thread needs to be woken


class Work(Protocol):
    """Where computing goes that would hold up the loop: a thread pool, or (under virtual time) right here."""

    async def run(self, call: Callable[[], T], /) -> T: ...


class InlineWork:
    """Does it at once."""

    async def run(self, call: Callable[[], T], /) -> T:
        return call()


class ThreadWork:
    """A few threads. Encoding, decoding and the grammar library release the interpreter while they work."""

    def __init__(self, num_threads: int = 2, name: str = "tokenize") -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=name)

    async def run(self, call: Callable[[], T], /) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)

    def close(self) -> None:
        """Let the threads go; what still runs there is not waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class ModelText:
    """The tokenizer, once there is one. Event-loop thread only.

    tokenizer  given at start: then workers with another one aren't taken in; or None: the first worker sends its files
    prepare    awaited with one that a worker has sent, before anybody gets it
    on_loaded  called when anybody gets it from now on
    """

    def __init__(self, work: Work, tokenizer: Tokenizer | None = None) -> None:
        self._work = work
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

    async def encode(self, tokenizer: Tokenizer, source: str | Chat) -> tuple[int, ...]:
        """Ids of a text, or of a chat by the model's template. Raises InvalidRequest."""
        if isinstance(source, str):
            call = _encoding(tokenizer, source)
            num_characters = len(source)
        else:
            call = _encoding_chat(tokenizer, source)
            num_characters = sum(len(message.content) for message in source.messages)
        if num_characters <= INLINE_CHARACTERS and isinstance(source, str):
            return call()
        return await self._work.run(call)

    async def bad_word_ids(self, tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """How the model may write these words: at the beginning of a text, and behind a space. docs/sampling.md.

        Raises InvalidRequest for a word that the tokenizer has no ids for.
        """
        if not words:
            return ()
        return await self._work.run(lambda: _bad_word_ids(tokenizer, words))

    async def decode(self, tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
        """Text of ids, special tokens included."""
        return await self._work.run(lambda: tokenizer.decode(token_ids, skip_special_tokens=False))


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


def _encoding(tokenizer: Tokenizer, text: str) -> Callable[[], tuple[int, ...]]:
    return lambda: tuple(tokenizer.encode(text))


def _encoding_chat(tokenizer: Tokenizer, chat: Chat) -> Callable[[], tuple[int, ...]]:
    messages = [message.as_template_sees_it() for message in chat.messages]
    tools = json.loads(chat.tools_json) if chat.tools_json else None
    variables = json.loads(chat.template_kwargs_json) if chat.template_kwargs_json else None
    return lambda: tuple(
        tokenizer.encode_chat(
            messages,
            tools,
            add_generation_prompt=chat.opens_turn,
            continue_final_message=chat.continue_final_message,
            variables=variables,
            parse_special_tokens=chat.parse_special_tokens,
        )
    )
