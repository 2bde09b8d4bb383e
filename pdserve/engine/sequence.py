"""One choice of one request inside one worker: its tokens, its blocks, and where it stands."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from pdserve.engine.phase_energy import PhaseEnergy
from pdserve.ids import NAMELESS, AttemptName
from pdserve.sampling import SampleKey
from pdserve.token_matcher import TokenMatcher


class SequenceState(Enum):
    """NEW → RESERVED → PREFILLING → RUNNING ⇄ PREEMPTED → (PREFILLING …) → LEFT → ENDED; any of them → ENDED.

    A hand-off goes NEW → RUNNING. LEFT: out of the scheduler by its own doing (finished, first token sampled for
    another worker, died, handed back); only what `Engine.end` releases is left of it.
    """

    NEW = "new"
    RESERVED = "reserved"
    PREFILLING = "prefilling"
    RUNNING = "running"
    PREEMPTED = "preempted"
    LEFT = "left"
    ENDED = "ended"


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """Engine-owned and mutable; compared by identity. Others read it, and fill it before it is started.

    ids                prompt (with replayed tokens) and what was sampled since
    num_prompt_tokens  where generated tokens begin in ids, for sampling and usage
    matcher            has taken in what was generated; None = any text will do
    name               whose it is, for logs
    num_strikes        failed steps the request was part of; with one it runs alone
    takes_hits         False: computes all its positions itself (prompt logprobs)
    block_table        blocks that it holds a reference on, in logical order
    num_computed       leading positions whose KV is complete
    num_cached_tokens  of those, the ones that were prefix hits when it was first admitted
    num_prefilled      positions computed before its first token was known, some again after a preemption; no hits
    num_scored         leading prompt tokens whose logprobs are made, or not wanted: the first one has none
    energy             what computing it took, as far as the machine can tell
    admitted_s         clock time of its first admission, kept over preemption: its age. Filled in by the engine
                       unless the owner knows better (the time of the grant)
    """

    handle: int
    session_id: int
    ids: list[int]
    num_prompt_tokens: int
    key: SampleKey
    matcher: TokenMatcher | None = None
    cache_salt: str = ""
    name: AttemptName = NAMELESS
    num_strikes: int = 0
    takes_hits: bool = True
    block_table: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_cached_tokens: int = 0
    num_prefilled: int = 0
    num_scored: int = 1
    energy: PhaseEnergy = field(default_factory=PhaseEnergy)
    admitted_s: float | None = None
    state: SequenceState = SequenceState.NEW
    # --- the engine's own notes
    serial: int = 0  # order of admission among equal admitted_s
    then_decode: bool = True
    has_sampled: bool = False  # its first token is known
    may_be_cached: bool = True  # False once its KV is in doubt
    block_hashes: list[bytes] = field(default_factory=list)  # of leading full blocks; they outlive preemption
    num_published: int = 0  # leading blocks of block_table already offered to the prefix cache

    @property
    def age_key(self) -> tuple[float, int]:
        """Orders sequences from the oldest to the youngest."""
        assert self.admitted_s is not None, "not admitted yet"
        return (self.admitted_s, self.serial)

    @property
    def num_generated(self) -> int:
        return len(self.ids) - self.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        """Positions to compute before the next token can be sampled; 1 while it decodes."""
        return len(self.ids) - self.num_computed
