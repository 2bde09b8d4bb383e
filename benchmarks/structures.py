"""What structured output costs: python -m benchmarks.structures MODEL …

For each model folder or fetched alias, and for some structures: time to compile, then of each mask and of each token
taken in, along random texts of the structure. One thread.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from pdserve.clock import Clock, SystemClock
from pdserve.grammar.compiler import compile_structure
from pdserve.grammar.vocabulary import GrammarVocabulary
from pdserve.modelstore.resolve import resolve
from pdserve.structure import Structure, StructureKind
from pdserve.token_mask import ids_of
from pdserve.tokenizer import Tokenizer

NUM_TEXTS = 10
MOST_TOKENS = 60

_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 5},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["street"],
        },
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
STRUCTURES = {
    "json_object": Structure(StructureKind.JSON_OBJECT),
    "schema, 7 fields": Structure(StructureKind.JSON_SCHEMA, (json.dumps(_PERSON),)),
    "schema, 300 fields": Structure(
        StructureKind.JSON_SCHEMA,
        (json.dumps({"properties": {f"field_{n}": {"type": "string"} for n in range(300)}}),),
    ),
    "enum of 1,000": Structure(
        StructureKind.JSON_SCHEMA, (json.dumps({"enum": [f"value number {n}" for n in range(1000)]}),)
    ),
    "regex, date": Structure(StructureKind.REGEX, (r"[0-9]{4}-[01][0-9]-[0-3][0-9]",)),
    "regex, any line": Structure(StructureKind.REGEX, (".{0,200}",)),
    "choices, 1,000": Structure(StructureKind.CHOICES, tuple(f"answer {n}" for n in range(1000))),
    "grammar, sums": Structure(
        StructureKind.GRAMMAR, ('start: sum\nsum: term (("+" | "-") term)*\nterm: /[0-9]+/ | "(" sum ")"',)
    ),
}


def measure(model: str, clock: Clock) -> Iterator[str]:
    """Lines of a table."""
    tokenizer = Tokenizer.load(resolve(model) if not Path(model).is_dir() else Path(model))
    begun_s = clock.now_s()
    vocabulary = GrammarVocabulary(tokenizer)
    yield f"{model}: {vocabulary.end_id} tokens, vocabulary built in {clock.now_s() - begun_s:.2f} s"
    yield f"{'':20}{'compile ms':>12}{'mask us p50':>13}{'p99':>8}{'max':>8}{'take us p50':>13}{'masks':>8}"
    for name, structure in STRUCTURES.items():
        begun_s = clock.now_s()
        compiled = compile_structure(structure, vocabulary)
        compile_ms = (clock.now_s() - begun_s) * 1e3
        masks_us: list[float] = []
        takes_us: list[float] = []
        for seed in range(NUM_TEXTS):
            source = random.Random(seed)
            matcher = compiled.matcher(())
            for _ in range(MOST_TOKENS):
                begun_s = clock.now_s()
                mask = matcher.mask()
                masks_us.append((clock.now_s() - begun_s) * 1e6)
                allowed = ids_of(mask)
                if not allowed:
                    break
                token_id = source.choice(allowed)
                begun_s = clock.now_s()
                matcher.take(token_id)
                takes_us.append((clock.now_s() - begun_s) * 1e6)
                if matcher.is_complete:
                    break
        masks_us.sort()
        takes_us.sort()
        count = len(masks_us)
        yield (
            f"{name:20}{compile_ms:12.1f}{masks_us[count // 2]:13.0f}{masks_us[count * 99 // 100]:8.0f}"
            f"{masks_us[-1]:8.0f}{takes_us[len(takes_us) // 2]:13.1f}{count:8}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    for model in parser.parse_args().models:
        for line in measure(model, SystemClock()):
            print(line, flush=True)


if __name__ == "__main__":
    main()
