"""What a child does with a structure: compile it and follow it a little, by bytes, whatever the model's tokens are."""

from __future__ import annotations

import functools

from pdserve.children.frames import Proven, ProveStructure
from pdserve.children.process_limits import cpu_s, private_bytes
from pdserve.grammar.compiler import compile_structure
from pdserve.grammar.vocabulary import GrammarVocabulary
from pdserve.grammar.walk import walk
from pdserve.structure import Structure, StructureKind


@functools.cache
def byte_vocabulary() -> GrammarVocabulary:
    """One token a byte: what a grammar costs is in its lexemes and rules, and the same for every vocabulary."""
    return GrammarVocabulary.of_bytes()


def prove_structure(job: ProveStructure) -> Proven:
    """Raises InvalidRequest: what is wrong and where, or that it is too complex for its first tokens."""
    begun_s, begun_bytes = cpu_s(), private_bytes()
    structure = Structure(StructureKind(job.kind), job.texts)
    compiled = compile_structure(structure, byte_vocabulary())
    walk(structure, compiled, byte_vocabulary())
    return Proven(cpu_s() - begun_s, max(structure.num_bytes, private_bytes() - begun_bytes))
