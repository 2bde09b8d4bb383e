"""The rule of the fake model, in plain Python: what it writes for a position and which token follows from that.

    record i  = words of h(word 0 of record i − 1, token i), RECORD_WORDS words of 64 bits
    digest    = xxh3-64 over the bytes of records 0 … L − 1, in order
    token L   = a letter chosen by xxh3-64(digest ‖ L ‖ seed ‖ choice); greedy: seed 0, choice 2**64 − 1

Ids that the key rules out (min_tokens, allowed and banned ids, bad words) or a mask does are passed over: the next
letter is taken that isn't, else end-of-sequence, else the next id that isn't. Temperature, filters, penalties and
biases have no effect, as there are no logits; logprobs are made up from digest and token.

All integers little-endian. Every bit of every record is in the digest, so KV that is missing, old, swapped or of
somebody else shows in the text.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import xxhash

from pdserve.sampling import SampleKey, SamplingParams, TokenLogprobs, forbidden_now
from pdserve.token_mask import TokenMask, allows
from pdserve.token_matcher import TokenMatcher, finish_by

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
    vocab_size: int = VOCAB_SIZE

    def next_token(
        self, digest: int, ids: Sequence[int], num_prompt_tokens: int, key: SampleKey, may: Allowed
    ) -> int | None:
        """The token behind `ids`, from the digest of their records; None if every token is ruled out.

        ids  only to find what the key rules out here
        may  whether an id is allowed by the key and, where there is one, a mask
        """
        greedy = key.params.temperature == 0
        seed, choice = (0, _MASK64) if greedy else (key.seed & _MASK64, key.choice)
        draw = xxhash.xxh3_64_intdigest(_CHOICE.pack(digest, len(ids), seed, choice))
        forbidden = forbidden_now(key, ids, num_prompt_tokens)
        if self.eos_one_in and draw % self.eos_one_in == 0 and EOS_ID not in forbidden and may(EOS_ID):
            return EOS_ID
        first = (draw >> 32) % len(ALPHABET)
        letter = ALPHABET[first]
        if letter not in forbidden and may(letter):
            return letter
        first_id = (draw >> 32) % self.vocab_size
        candidates = itertools.chain(
            ALPHABET[first:], ALPHABET[:first], (EOS_ID,), range(first_id, self.vocab_size), range(first_id)
        )
        return next((each for each in candidates if each not in forbidden and may(each)), None)

    def logprobs(self, digest: int, position: int, token_id: int, top: int) -> TokenLogprobs:
        """Made up for the token at `position`, from the digest of all records before it; `top` ids beside it."""
        draw = xxhash.xxh3_64_intdigest(_CHOICE.pack(digest, position, token_id, 0))
        first = draw % self.vocab_size
        best = tuple(((first + rank) % self.vocab_size, -(draw % 64 + 64 * rank) / 64) for rank in range(top))
        return TokenLogprobs(-(draw % 1024) / 64, best)


Allowed = Callable[[int], bool]
"""Whether an id may be sampled at all."""


def allowed_by(key: SampleKey) -> Allowed:
    """By allowed_token_ids; all if there are none."""
    allowed = key.params.allowed_token_ids
    return frozenset(allowed).__contains__ if allowed else _all


def both(may: Allowed, mask: TokenMask) -> Allowed:
    """By the mask, too."""
    return lambda token_id: may(token_id) and allows(mask, token_id)


def _all(token_id: int) -> bool:
    return True


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
    matcher: TokenMatcher | None = None,
) -> list[int]:
    """What the fake model answers to a prompt until the key's conditions end it.

    num_prompt_tokens  where generated tokens begin if prompt_ids holds replayed ones; they aren't given again
    matcher            of the structure, where the key has one; it has taken in the replayed ones
    """
    return list(answering(prompt_ids, key, num_prompt_tokens=num_prompt_tokens, rule=rule, matcher=matcher))


def answering(
    prompt_ids: Sequence[int],
    key: SampleKey,
    *,
    num_prompt_tokens: int | None = None,
    rule: FakeRule | None = None,
    matcher: TokenMatcher | None = None,
) -> Iterator[int]:
    """The tokens of `expected_choice` one by one; O(1) each."""
    for token_id, _ in answering_with_logprobs(
        prompt_ids, key, num_prompt_tokens=num_prompt_tokens, rule=rule, matcher=matcher
    ):
        yield token_id


def answering_with_logprobs(
    prompt_ids: Sequence[int],
    key: SampleKey,
    *,
    num_prompt_tokens: int | None = None,
    rule: FakeRule | None = None,
    matcher: TokenMatcher | None = None,
) -> Iterator[tuple[int, TokenLogprobs | None]]:
    """As `answering`, each with its logprobs if the key asks for them. Ends too when every token is ruled out."""
    rule = rule or FakeRule()
    num_prompt_tokens = len(prompt_ids) if num_prompt_tokens is None else num_prompt_tokens
    by_key = allowed_by(key)
    top = key.params.logprobs
    hasher = xxhash.xxh3_64()
    word = 0
    ids = list(prompt_ids)
    for token_id in prompt_ids:
        word = link(word, token_id)
        hasher.update(record(word))
    while True:
        digest = hasher.intdigest()
        may = by_key if matcher is None else both(by_key, matcher.mask())
        sampled = rule.next_token(digest, ids, num_prompt_tokens, key, may)
        if sampled is None:
            return
        yield sampled, None if top is None else rule.logprobs(digest, len(ids), sampled, top)
        ids.append(sampled)
        if finish_by(key, sampled, len(ids) - num_prompt_tokens, matcher) is not None:
            return
        word = link(word, sampled)
        hasher.update(record(word))


def expected_prompt_logprobs(
    prompt_ids: Sequence[int], top: int, rule: FakeRule | None = None
) -> tuple[TokenLogprobs, ...]:
    """What the fake model says of a prompt's tokens, from index 1 on."""
    rule = rule or FakeRule()
    hasher = xxhash.xxh3_64()
    word = 0
    scores: list[TokenLogprobs] = []
    for position, token_id in enumerate(prompt_ids):
        if position:
            scores.append(rule.logprobs(hasher.intdigest(), position, token_id, top))
        word = link(word, token_id)
        hasher.update(record(word))
    return tuple(scores)


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
