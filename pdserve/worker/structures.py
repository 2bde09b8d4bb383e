"""Compiled structures on a worker: what the engine must not do between two steps is done here, on another thread."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import structlog

from pdserve.clock import Clock
from pdserve.errors import Incompatible, InvariantViolated, PdserveError
from pdserve.messages import StartDecode, StartPrefill
from pdserve.sampling import end_token_ids
from pdserve.structure import Structure
from pdserve.token_matcher import TokenMatcher

if TYPE_CHECKING:
    from pdserve.grammar.cache import StructureCache
    from pdserve.grammar.matcher import CompiledStructure
    from pdserve.grammar.vocabulary import GrammarVocabulary

log = structlog.get_logger()


class WorkerStructures:
    """One thread at a time: the background's.

    tokenizer_files  of the model that is served. Read, and the grammar library imported, when the first request with
                     a structure comes
    """

    def __init__(self, tokenizer_files: Mapping[str, bytes], clock: Clock) -> None:
        self._tokenizer_files = tokenizer_files
        self._clock = clock
        self._vocabulary: GrammarVocabulary | None = None
        self._cache: StructureCache[CompiledStructure] | None = None

    def matcher(self, start: StartPrefill | StartDecode) -> TokenMatcher | PdserveError:
        """For an attempt, behind the tokens that its request has generated already; or why there can't be one."""
        structure = start.key.params.structure
        assert structure is not None, "only of a request with a structure"
        try:
            generated = start.token_ids[start.num_prompt_tokens :]
            return self._compiled(structure).matcher(end_token_ids(start.key), generated)
        except PdserveError as error:
            return error
        except ImportError as error:
            return Incompatible("this worker can't import the grammar library", why=error)
        except Exception as error:  # the outermost frame of this work: the worker goes on
            log.error("structure.crashed", handle=start.handle, exc_info=error)
            return InvariantViolated("compiling a structure crashed", cause=type(error).__name__)

    def _compiled(self, structure: Structure) -> CompiledStructure:
        from pdserve.grammar.cache import StructureCache
        from pdserve.grammar.compiler import compile_structure

        if self._cache is None:
            self._cache = StructureCache()
        found = self._cache.get(structure)
        if found is not None:
            return found
        vocabulary = self._read_vocabulary()
        begun_s = self._clock.now_s()
        compiled = compile_structure(structure, vocabulary)
        log.info(
            "structure.compiled",
            kind=structure.kind.value,
            num_bytes=structure.num_bytes,
            took_s=round(self._clock.now_s() - begun_s, 4),
        )
        self._cache.put(structure, compiled)
        return compiled

    def _read_vocabulary(self) -> GrammarVocabulary:
        if self._vocabulary is None:
            from pdserve.grammar.vocabulary import GrammarVocabulary
            from pdserve.tokenizer import Tokenizer

            begun_s = self._clock.now_s()
            self._vocabulary = GrammarVocabulary(Tokenizer.from_files(self._tokenizer_files))
            log.info("vocabulary.read", took_s=round(self._clock.now_s() - begun_s, 3))
        return self._vocabulary
