"""What requests want their text to be, compiled before anything is reserved.

First in a child process, which shows that it ends within limits; then here, off the loop, once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import structlog

from pdserve.children.prover import Prover
from pdserve.children.shared_calls import SharedCalls, Spawn
from pdserve.clock import Clock
from pdserve.errors import Failure, Incompatible, InvariantViolated, PdserveError, from_failure, to_failure
from pdserve.steps import at_once
from pdserve.structure import Structure
from pdserve.token_matcher import TokenMatcher
from pdserve.tokenizer import Tokenizer
from router.metrics import RouterMetrics
from router.turns import Turns

if TYPE_CHECKING:
    from pdserve.grammar.cache import StructureCache
    from pdserve.grammar.vocabulary import GrammarVocabulary

log = structlog.get_logger()

NUM_THREADS = 2  # of `turns`: compiles at once, each of which has ended in a child before


class Compiled(Protocol):
    """Gives each choice its matcher."""

    def matcher(self, ends: Sequence[int], token_ids: Sequence[int] = ()) -> TokenMatcher: ...


class Structures:
    """Event-loop thread only.

    prover  tells beforehand whether a structure compiles within limits
    turns   where it is compiled then: the library releases the interpreter
    spawn   begins a task that lives as long as it needs, whoever asked for it goes
    """

    def __init__(
        self, prover: Prover, turns: Turns, spawn: Spawn, clock: Clock, metrics: RouterMetrics
    ) -> None:
        self._prover = prover
        self._turns = turns
        self._spawn = spawn
        self._clock = clock
        self._metrics = metrics
        self._of_model: _OfModel | None = None

    async def prepare(self, tokenizer: Tokenizer) -> None:
        """Read a model's vocabulary now, as long as nobody is served: it holds the interpreter for up to a second.

        What is wrong with it is said to the requests that need it.
        """
        model = self._of_model = _OfModel(tokenizer, self._spawn)
        model.vocabulary = self._spawn(self._read_vocabulary(tokenizer))
        await asyncio.shield(model.vocabulary)

    async def compile(self, structure: Structure, tokenizer: Tokenizer, *, user: str) -> Compiled:
        """From the cache, or compiled now, in this user's turn.

        Raises InvalidRequest: what is wrong and where, or the limit exceeded.
        """
        model = self._of_model
        if model is None or model.tokenizer is not tokenizer:
            model = self._of_model = _OfModel(tokenizer, self._spawn)
        found = model.cache.get(structure)
        if found is not None or structure in model.compiling:
            self._metrics.structure_hits.inc()
        if found is not None:
            return found
        try:
            return await model.compiling.join(structure, lambda: self._compile(structure, model, user))
        except PdserveError:
            self._metrics.structures_refused.labels(kind=structure.kind.value).inc()
            raise

    async def _vocabulary(self, model: _OfModel) -> GrammarVocabulary:
        """The model's tokens as the library knows them; the first request waits for it."""
        if model.vocabulary is None:
            model.vocabulary = self._spawn(self._read_vocabulary(model.tokenizer))
        found: GrammarVocabulary | Failure = await asyncio.shield(model.vocabulary)
        if isinstance(found, Failure):
            raise from_failure(found)
        return found

    async def _read_vocabulary(self, tokenizer: Tokenizer) -> GrammarVocabulary | Failure:
        """Never raises but CancelledError: nobody may be there to hear it."""
        begun_s = self._clock.now_s()
        try:
            from pdserve.grammar.vocabulary import GrammarVocabulary

            vocabulary = await self._turns.run(
                at_once(lambda: GrammarVocabulary(tokenizer)), user="", num_bytes=0
            )
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

    async def _compile(self, structure: Structure, model: _OfModel, user: str) -> Compiled:
        vocabulary = await self._vocabulary(model)
        begun_s = self._clock.now_s()
        try:
            proven = await self._prover.prove(structure, user)
            steps = at_once(lambda: _compile(structure, vocabulary))
            found = await self._turns.run(steps, user=user, num_bytes=0)
        finally:
            self._metrics.structures_compiled.labels(kind=structure.kind.value).inc()
            self._metrics.structure_compile_s.observe(self._clock.now_s() - begun_s)
        model.cache.put(structure, found, proven.num_bytes)
        return found


def _compile(structure: Structure, vocabulary: GrammarVocabulary) -> Compiled:
    """On another thread."""
    from pdserve.grammar.compiler import compile_structure

    try:
        return compile_structure(structure, vocabulary)
    except PdserveError:
        raise
    except Exception as bug:  # the outermost frame of this work: other requests go on
        log.error("structure.crashed", kind=structure.kind.value, exc_info=bug)
        raise InvariantViolated("compiling the structure crashed", cause=type(bug).__name__) from bug


class _OfModel:
    """What is kept for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, spawn: Spawn) -> None:
        from pdserve.grammar.cache import StructureCache

        self.tokenizer = tokenizer
        self.vocabulary: asyncio.Task[GrammarVocabulary | Failure] | None = None
        self.cache: StructureCache[Compiled] = StructureCache()
        self.compiling: SharedCalls[Structure, Compiled] = SharedCalls(spawn)
