"""Compiled structures on a worker: what the engine must not do between two steps is done here, on another thread."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import structlog

from pdserve.clock import Clock
from pdserve.errors import Incompatible, InvariantViolated, PdserveError, from_failure, to_failure
from pdserve.messages import StartDecode, StartPrefill
from pdserve.sampling import end_token_ids
from pdserve.structure import Structure
from pdserve.token_matcher import TokenMatcher
from pdserve.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pdserve.grammar.cache import StructureCache
    from pdserve.grammar.matcher import CompiledStructure
    from pdserve.grammar.vocabulary import GrammarVocabulary

log = structlog.get_logger()


class WorkerStructures:
    """One thread at a time: the one that loads the model, then the background's.

    tokenizer_files  of the model that is served; read when they are needed, unless `prepare` was called
    """

    def __init__(self, tokenizer_files: Mapping[str, bytes], clock: Clock) -> None:
        self._tokenizer_files = tokenizer_files
        self._clock = clock
        self._vocabulary: GrammarVocabulary | PdserveError | None = None
        self._cache: StructureCache[CompiledStructure] | None = None

    def prepare(self, tokenizer: Tokenizer) -> None:
        """Read the model's vocabulary now, as long as nobody is served: it holds the interpreter for up to a second.

        What is wrong with it is said to the requests that need it.
        """
        begun_s = self._clock.now_s()
        try:
            from pdserve.grammar.vocabulary import GrammarVocabulary

            self._vocabulary = GrammarVocabulary(tokenizer)
        except PdserveError as error:
            self._vocabulary = error
        except ImportError as error:
            self._vocabulary = Incompatible("this worker can't import the grammar library", why=error)
        if isinstance(self._vocabulary, PdserveError):
            log.warning("vocabulary.unusable", reason=str(self._vocabulary))
        else:
            log.info("vocabulary.read", took_s=round(self._clock.now_s() - begun_s, 3))

    def matcher(self, start: StartPrefill | StartDecode, num_bytes: int) -> TokenMatcher | PdserveError:
        """For an attempt, behind the tokens that its request has generated already; or why there can't be one.

        num_bytes  what its structure takes, compiled
        """
        structure = start.key.params.structure
        assert structure is not None, "only of a request with a structure"
        try:
            generated = start.token_ids[start.num_prompt_tokens :]
            return self._compiled(structure, num_bytes).matcher(end_token_ids(start.key), generated)
        except PdserveError as error:
            return error
        except Exception as error:  # the outermost frame of this work: the worker goes on
            log.error("structure.crashed", handle=start.handle, **start.name.logged, exc_info=error)
            return InvariantViolated("compiling a structure crashed", cause=type(error).__name__)

    def _compiled(self, structure: Structure, num_bytes: int) -> CompiledStructure:
        vocabulary = self._read_vocabulary()  # first: it says whether there is a library
        from pdserve.grammar.cache import StructureCache
        from pdserve.grammar.compiler import compile_structure

        if self._cache is None:
            self._cache = StructureCache()
        found = self._cache.get(structure)
        if found is not None:
            return found
        begun_s = self._clock.now_s()
        compiled = compile_structure(structure, vocabulary)
        log.info(
            "structure.compiled",
            kind=structure.kind.value,
            num_bytes=structure.num_bytes,
            took_s=round(self._clock.now_s() - begun_s, 4),
        )
        self._cache.put(structure, compiled, num_bytes)
        return compiled

    def _read_vocabulary(self) -> GrammarVocabulary:
        if self._vocabulary is None:
            self.prepare(Tokenizer.from_files(self._tokenizer_files))
        assert self._vocabulary is not None, "prepared"
        if isinstance(self._vocabulary, PdserveError):
            raise from_failure(to_failure(self._vocabulary))
        return self._vocabulary
