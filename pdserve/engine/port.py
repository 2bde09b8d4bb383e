"""The engine port: what the scheduler needs of a model. Implementations: torch (`torch_runner`), fake (`fake_runner`).

The scheduler decides which positions are computed and which blocks they lie in; a runner computes them and samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

from pdserve.engine.layout import KvLayout
from pdserve.errors import RowFailed
from pdserve.kv_memory import KvMemory
from pdserve.sampling import SampleKey, TokenLogprobs
from pdserve.token_mask import TokenMask


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """Sample the token behind `ids`; a pure function of these values and the logits.

    ids   prompt and tokens so far
    mask  which tokens the request's structure allows here; None = all
    num_unknown  tokens behind `ids` that are sampled and not known yet (`LaunchingRunner`)
    """

    key: SampleKey
    ids: Sequence[int]
    num_prompt_tokens: int
    mask: TokenMask | None = None
    num_unknown: int = 0

    @property
    def position(self) -> int:
        """Of the sampled token."""
        return len(self.ids) + self.num_unknown


@dataclass(frozen=True, slots=True)
class ScoreSpec:
    """Say how likely given tokens are, e.g. those of a prompt.

    next_ids  [n ≤ tokens of the row]: next_ids[i] stands behind position start + first + i
    first     leading positions of the row that are left out
    top       most likely tokens to name beside each
    """

    next_ids: Sequence[int]
    first: int
    top: int


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's part of a step: compute token_ids at positions start, start + 1, ….

    block_table  block ids in logical order, covering start + len(token_ids) positions
    sample       None when the chunk isn't the last one
    score        None when nobody asks how likely its tokens are
    """

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    sample: SampleSpec | None
    score: ScoreSpec | None = None


@dataclass(frozen=True, slots=True)
class RowOutput:
    """What one row gave: a token if one was asked for, or the error that ends this sequence only.

    logprobs  of the token, if its SampleSpec asks
    scores    one for each of score.next_ids
    energy_j  the row's share of the step; None: the machine can't tell, or nobody measures
    """

    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    error: RowFailed | None = None
    scores: tuple[TokenLogprobs, ...] = ()
    energy_j: float | None = None


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What others must know of the loaded model.

    window_tokens  the model's context window; cache_seed: the model's part of the block hash
    numerics       workers of equal text give equal bits (dtype, threads, CPU capability, library versions)
    step_errors_are_sound  after `run` raised, the process may go on: all its work was done or never begun (a CPU)
    gpus           that it computes on, by their driver's (NVML) index
    """

    name: str
    vocab_size: int
    window_tokens: int
    weights_fingerprint: str
    numerics: str
    deterministic: bool
    cache_seed: bytes
    step_errors_are_sound: bool = True
    gpus: tuple[int, ...] = ()


def nothing_left(spec: SampleSpec, position: int) -> RowFailed:
    """The error of a row that has no token to sample from: with a structure, two wishes of its request collide.

    position  of the spec when its step began: its ids may have grown since
    """
    structure = spec.key.params.structure
    if structure is None:
        return RowFailed("every token is ruled out", position=position)
    return RowFailed(
        f"what {structure.kind.value} allows here, the request's other settings or the vocabulary rule out",
        position=position,
    )


def misfit(row: Row, card: ModelCard, layout: KvLayout) -> RowFailed | None:
    """What is wrong with a row that names a token or block that isn't there, or too few blocks."""
    if not row.token_ids:
        return RowFailed("a row without tokens")
    if min(row.token_ids) < 0 or max(row.token_ids) >= card.vocab_size:
        return RowFailed("a token id outside the vocabulary", vocab_size=card.vocab_size)
    need = layout.blocks_for(row.start + len(row.token_ids))
    if row.start < 0 or len(row.block_table) < need:
        return RowFailed("a block table too short for its positions", want=need, got=len(row.block_table))
    table = row.block_table if len(row.block_table) == need else row.block_table[:need]
    if min(table) < 0 or max(table) >= layout.num_blocks:
        return RowFailed("a block id outside the pool", num_blocks=layout.num_blocks)
    return None


def sort_out(rows: Sequence[Row], card: ModelCard, layout: KvLayout) -> tuple[list[RowOutput], list[int]]:
    """An output for each row, with the error of those that fit nowhere; and which rows are to be computed."""
    outputs = [RowOutput(error=misfit(row, card, layout)) for row in rows]
    return outputs, [index for index, output in enumerate(outputs) if output.error is None]


class Runner(Protocol):
    """Engine owner's thread only, but for `pool`, which the transfer owner reads and writes block by block."""

    @property
    def card(self) -> ModelCard: ...

    @property
    def layout(self) -> KvLayout: ...

    @property
    def pool(self) -> KvMemory:
        """The KV pool's memory, [num_blocks * block_bytes]; block b begins at b * block_bytes."""
        ...

    def run(self, rows: Sequence[Row]) -> list[RowOutput]:
        """One forward pass: writes the rows' KV into their blocks, samples and scores where asked; one output a row,
        in order.

        When it returns, the KV is complete. Raises when the step as a whole failed; the pool then may hold garbage
        in the rows' blocks, nowhere else.
        """
        ...


Launched = TypeVar("Launched")


@runtime_checkable
class LaunchingRunner(Runner, Protocol[Launched]):
    """A runner on a device, which computes beside the host: a step can be launched before the one before it is read.

    Steps are collected in the order in which they were launched, and at most two are launched and not collected.
    """

    def launch(self, rows: Sequence[Row], after: Mapping[int, int] | None = None) -> Launched:
        """Begin what `run` does. Doesn't wait for the device, unless a row is to be scored.

        after  rows of one token that isn't known yet: it is what that row of the step launched last samples. Their
               token_ids say nothing, their SampleSpec has num_unknown = 1
        Rows are read before it returns, but for their SampleSpecs: what is behind the ids that these had may change.
        """
        ...

    def collect(self, launched: Launched) -> list[RowOutput]:
        """Wait for a step, and give what `run` does. A row behind one that failed gives something without meaning."""
        ...
