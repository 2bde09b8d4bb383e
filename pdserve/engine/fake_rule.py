"""The rule of the fake model, in plain Python: what it writes for a position and which token follows from that.

    record i  = words of h(word 0 of record i − 1, token i), RECORD_WORDS words of 64 bits
    digest    = xxh3-64 over the bytes of records 0 … L − 1, in order
    token L   = a letter chosen by xxh3-64(digest ‖ L ‖ seed ‖ choice); greedy: seed 0, choice 2**64 − 1

All integers little-endian. Every bit of every record is in the digest, so KV that is missing, old, swapped or of
somebody else shows in the text.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import xxhash

from pdserve.sampling import SampleKey, SamplingParams, finish_reason, forbidden_until_min

RECORD_WORDS = 4  # kv_heads 2 × layers 1 × (k, v)
EOS_ID = 256
VOCAB_SIZE = 260
ALPHABET = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 ."

# Word j of a record is word 0 xor this: they only have to differ.
WORD_MASKS = (0, 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)

_LINK = struct.Struct("<QI")
_CHOICE = struct.Struct("<QQQQ")
_RECORD = struct.Struct(f"<{RECORD_WORDS}Q")
_MASK64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class FakeRule:
    """What can be asked of the fake model.

    eos_one_in  about every n-th token ends the text; 0: none does, so only max_tokens does
    """

    eos_one_in: int = 0

    def next_token(self, digest: int, position: int, num_prompt_tokens: int, key: SampleKey) -> int:
        """The token for `position`, from the digest of all records before it."""
        greedy = key.params.temperature == 0
        seed, choice = (0, _MASK64) if greedy else (key.seed & _MASK64, key.choice)
        draw = xxhash.xxh3_64_intdigest(_CHOICE.pack(digest, position, seed, choice))
        forbidden = forbidden_until_min(key, position - num_prompt_tokens)
        if self.eos_one_in and draw % self.eos_one_in == 0 and EOS_ID not in forbidden:
            return EOS_ID
        first = (draw >> 32) % len(ALPHABET)
        letters = ALPHABET[first:] + ALPHABET[:first] if forbidden else ALPHABET[first : first + 1]
        return next((letter for letter in letters if letter not in forbidden), EOS_ID)


def link(word: int, token_id: int) -> int:
    """Word 0 of a record from word 0 of the one before it (0 before the first) and its token."""
    return xxhash.xxh3_64_intdigest(_LINK.pack(word, token_id))


def record(word: int) -> bytes:
    """All bytes of a record, from its word 0."""
    return _RECORD.pack(*[word ^ mask for mask in WORD_MASKS])


def expected_choice(
    prompt_ids: Sequence[int],
    key: SampleKey,
    *,
    num_prompt_tokens: int | None = None,
    rule: FakeRule | None = None,
) -> list[int]:
    """What the fake model answers to a prompt until the key's conditions end it.

    num_prompt_tokens  where generated tokens begin if prompt_ids holds replayed ones; they aren't given again
    """
    return list(answering(prompt_ids, key, num_prompt_tokens=num_prompt_tokens, rule=rule))


def answering(
    prompt_ids: Sequence[int],
    key: SampleKey,
    *,
    num_prompt_tokens: int | None = None,
    rule: FakeRule | None = None,
) -> Iterator[int]:
    """The tokens of `expected_choice` one by one; O(1) each."""
    rule = rule or FakeRule()
    num_prompt_tokens = len(prompt_ids) if num_prompt_tokens is None else num_prompt_tokens
    hasher = xxhash.xxh3_64()
    word = 0
    for token_id in prompt_ids:
        word = link(word, token_id)
        hasher.update(record(word))
    position = len(prompt_ids)
    while True:
        token_id = rule.next_token(hasher.intdigest(), position, num_prompt_tokens, key)
        yield token_id
        position += 1
        if finish_reason(key, token_id, position - num_prompt_tokens) is not None:
            return
        word = link(word, token_id)
        hasher.update(record(word))


def expected_tokens(
    prompt_ids: Sequence[int],
    num_tokens: int,
    *,
    seed: int = 0,
    choice: int = 0,
    greedy: bool = False,
    num_prompt_tokens: int | None = None,
    rule: FakeRule | None = None,
) -> list[int]:
    """The num_tokens tokens behind prompt_ids, or fewer if the rule ends the text; ended by no stop ids."""
    num_replayed = 0 if num_prompt_tokens is None else len(prompt_ids) - num_prompt_tokens
    key = SampleKey(
        params=SamplingParams(temperature=0.0 if greedy else 1.0),
        seed=seed,
        choice=choice,
        eos_token_ids=(EOS_ID,),
        max_tokens=num_replayed + num_tokens,
    )
    return expected_choice(prompt_ids, key, num_prompt_tokens=num_prompt_tokens, rule=rule)
