"""What requests want their text to be, compiled before anything is reserved: off the loop, in bounded time, once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import structlog

from pdserve.clock import Clock
from pdserve.errors import (
    Failure,
    Incompatible,
    InvalidRequest,
    InvariantViolated,
    PdserveError,
    from_failure,
    to_failure,
)
from pdserve.structure import Structure
from pdserve.token_matcher import TokenMatcher
from pdserve.tokenizer import Tokenizer
from router.metrics import RouterMetrics
from router.model_text import Work

if TYPE_CHECKING:
    from pdserve.grammar.vocabulary import GrammarVocabulary

log = structlog.get_logger()

NUM_THREADS = 2  # compiles at once; one that takes too long keeps its thread until the library gives up


class Compiled(Protocol):
    """Gives each choice its matcher."""

    def matcher(self, ends: Sequence[int], token_ids: Sequence[int] = ()) -> TokenMatcher: ...


Spawn = Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]]


class Structures:
    """Event-loop thread only.

    work     where the library works; NUM_THREADS calls must be able to run at once
    spawn    begins a task that lives as long as it needs, whoever asked for it goes
    limit_s  how long one may take to compile
    """

    def __init__(
        self, work: Work, spawn: Spawn, clock: Clock, metrics: RouterMetrics, limit_s: float
    ) -> None:
        self._work = work
        self._spawn = spawn
        self._clock = clock
        self._metrics = metrics
        self._limit_s = limit_s
        self._threads = asyncio.Semaphore(NUM_THREADS)
        self._running: dict[asyncio.Task[Any], None] = {}
        self._of_model: _OfModel | None = None

    def close(self) -> None:
        """The router stops: what still compiles is not waited for."""
        for running in self._running:
            running.cancel()

    async def prepare(self, tokenizer: Tokenizer) -> None:
        """Read a model's vocabulary now, as long as nobody is served: it holds the interpreter for up to a second.

        What is wrong with it is said to the requests that need it.
        """
        model = self._of_model = _OfModel(tokenizer)
        model.vocabulary = self._spawn(self._read_vocabulary(tokenizer))
        await asyncio.shield(model.vocabulary)

    async def compile(self, structure: Structure, tokenizer: Tokenizer) -> Compiled:
        """From the cache, or compiled now. Raises InvalidRequest: what is wrong and where, or the limit exceeded."""
        model = self._of_model
        if model is None or model.tokenizer is not tokenizer:
            model = self._of_model = _OfModel(tokenizer)
        found = model.cache.get(structure)
        if found is None:
            compiling = model.compiling.get(structure)
            if compiling is None:
                compiling = model.compiling[structure] = self._spawn(self._compile(structure, model))
            else:
                self._metrics.structure_hits.inc()
            found = await asyncio.shield(compiling)
        else:
            self._metrics.structure_hits.inc()
        if isinstance(found, Failure):
            self._metrics.structures_refused.labels(kind=structure.kind.value).inc()
            raise from_failure(found)
        return found

    async def _compile(self, structure: Structure, model: _OfModel) -> Compiled | Failure:
        """Never raises but CancelledError: nobody may be there to hear it."""
        try:
            found: Compiled | Failure = await self._compile_in_time(structure, model)
        except PdserveError as error:
            found = to_failure(error)
        finally:
            del model.compiling[structure]
        model.cache.put(structure, found)
        return found

    async def _vocabulary(self, model: _OfModel) -> GrammarVocabulary:
        """The model's tokens as the library knows them; the first request waits for it."""
        if model.vocabulary is None:
            model.vocabulary = self._spawn(self._read_vocabulary(model.tokenizer))
        found: GrammarVocabulary | Failure = await asyncio.shield(model.vocabulary)
        if isinstance(found, Failure):
            raise from_failure(found)
        return found

    async def _read_vocabulary(self, tokenizer: Tokenizer) -> GrammarVocabulary | Failure:
        """Never raises but CancelledError, as above."""
        begun_s = self._clock.now_s()
        try:
            from pdserve.grammar.vocabulary import GrammarVocabulary

            vocabulary = await self._work.run(lambda: GrammarVocabulary(tokenizer))
        except PdserveError as error:
            return to_failure(error)
        except ImportError as error:
            log.error("structure.no_library", exc_info=error)
            return to_failure(Incompatible("this router can't import the grammar library", why=error))
        except Exception as bug:  # the outermost frame of this task: other requests go on
            log.error("structure.crashed", exc_info=bug)
            return to_failure(InvariantViolated("reading the vocabulary crashed", cause=type(bug).__name__))
        log.info("vocabulary.read", took_s=round(self._clock.now_s() - begun_s, 3))
        return vocabulary

    async def _compile_in_time(self, structure: Structure, model: _OfModel) -> Compiled:
        vocabulary = await self._vocabulary(model)
        await self._threads.acquire()
        begun_s = self._clock.now_s()
        running: asyncio.Task[Compiled | PdserveError]
        running = self._spawn(self._work.run(lambda: _compile(structure, vocabulary)))
        self._running[running] = None
        running.add_done_callback(lambda done: self._thread_is_free(done, structure, model))
        try:
            async with asyncio.timeout(self._limit_s):
                found = await asyncio.shield(running)
        except TimeoutError:
            took_s = round(self._clock.now_s() - begun_s, 3)
            raise InvalidRequest(
                f"{structure.kind.value} takes too long to compile", limit_s=self._limit_s, value=took_s
            ) from None
        finally:
            took_s = self._clock.now_s() - begun_s
            self._metrics.structures_compiled.labels(kind=structure.kind.value).inc()
            self._metrics.structure_compile_s.observe(took_s)
        if isinstance(found, PdserveError):
            raise found
        return found

    def _thread_is_free(
        self, running: asyncio.Task[Compiled | PdserveError], structure: Structure, model: _OfModel
    ) -> None:
        del self._running[running]
        self._threads.release()
        if not running.cancelled():
            # Also what comes too late for the one who asked: it may have been the machine's fault.
            found = running.result()
            model.cache.put(structure, to_failure(found) if isinstance(found, PdserveError) else found)


def _compile(structure: Structure, vocabulary: GrammarVocabulary) -> Compiled | PdserveError:
    """On another thread. An error is given back: nobody may wait for it any more."""
    from pdserve.grammar.compiler import compile_structure

    try:
        return compile_structure(structure, vocabulary)
    except PdserveError as error:
        return error
    except Exception as bug:  # the outermost frame of this work: other requests go on
        log.error("structure.crashed", kind=structure.kind.value, exc_info=bug)
        return InvariantViolated("compiling the structure crashed", cause=type(bug).__name__)


class _OfModel:
    """What is kept for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        from pdserve.grammar.cache import StructureCache

        self.tokenizer = tokenizer
        self.vocabulary: asyncio.Task[GrammarVocabulary | Failure] | None = None
        self.cache: StructureCache[Compiled | Failure] = StructureCache()
        self.compiling: dict[Structure, asyncio.Task[Compiled | Failure]] = {}
