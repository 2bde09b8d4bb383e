"""Drives a runner by hand: prompts cut where a test wants, batches mixed as it wants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from torch import Tensor

from pdserve.engine.numerics import Precision
from pdserve.engine.parallel.team import ALONE, Team
from pdserve.engine.port import Row, Runner, SampleSpec
from pdserve.engine.torch_runner import TorchRunner
from pdserve.kv_memory import HostMemory
from pdserve.sampling import SampleKey, SamplingParams
from tests.support.memories import pool_bytes

BLOCK_SIZE = 16


class GivesLogits(Runner, Protocol):
    """A runner that computes them."""

    def logits(self, rows: Sequence[Row]) -> Tensor: ...


GREEDY = SamplingParams(temperature=0)


def make_runner(
    folder: Path,
    *,
    dtype: str = "float32",
    deterministic: bool = False,
    num_blocks: int = 256,
    num_threads: int = 1,
    long_context: bool = False,
    precision: Precision | None = None,
    make_memory: Callable[[int], HostMemory] = HostMemory,
    team: Team = ALONE,
) -> TorchRunner:
    return TorchRunner(
        folder,
        dtype=dtype,
        deterministic=deterministic,
        num_threads=num_threads,
        num_blocks=num_blocks,
        kv_memory_bytes=0,
        block_size=BLOCK_SIZE,
        long_context=long_context,
        precision=precision,
        make_memory=make_memory,
        team=team,
    )


def sample_key(params: SamplingParams = GREEDY, seed: int = 7, choice: int = 0) -> SampleKey:
    return SampleKey(params=params, seed=seed, choice=choice, eos_token_ids=(), max_tokens=1000)


@dataclass
class Stream:
    """One sequence under test; its blocks are given by the test. num_computed positions are in the pool."""

    ids: list[int]
    block_table: list[int]
    key: SampleKey = field(default_factory=sample_key)
    num_computed: int = 0
    num_prompt_tokens: int = 0

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_prompt_tokens or len(self.ids)

    def row(self, length: int) -> Row:
        """The next `length` tokens (or what is left) as a row, which samples if it holds the last one."""
        stop = min(self.num_computed + length, len(self.ids))
        spec = (
            SampleSpec(self.key, tuple(self.ids), self.num_prompt_tokens) if stop == len(self.ids) else None
        )
        return Row(
            tuple(self.ids[self.num_computed : stop]), self.num_computed, tuple(self.block_table), spec
        )

    def computed(self, row: Row, token_id: int | None) -> None:
        """Note that a row of this sequence ran."""
        self.num_computed += len(row.token_ids)
        if token_id is not None:
            self.ids.append(token_id)


def advance(runner: Runner, parts: Sequence[tuple[Stream, int]]) -> None:
    """One step: each sequence computes so many tokens; sampled ones are appended."""
    rows = [stream.row(length) for stream, length in parts]
    for (stream, _), row, output in zip(parts, rows, runner.run(rows), strict=True):
        assert output.error is None
        stream.computed(row, output.token_id)


def advance_with_logits(runner: GivesLogits, parts: Sequence[tuple[Stream, int]]) -> list[Tensor | None]:
    """The same, greedy, giving the logits of rows that sampled."""
    rows = [stream.row(length) for stream, length in parts]
    logits = iter(runner.logits(rows))
    given: list[Tensor | None] = []
    for (stream, _), row in zip(parts, rows, strict=True):
        here = next(logits).clone() if row.sample else None
        stream.computed(row, None if here is None else int(here.argmax()))
        given.append(here)
    return given


def copy_blocks(source: Runner, source_ids: Sequence[int], target: Runner, target_ids: Sequence[int]) -> None:
    """What a link does: move whole blocks, byte by byte."""
    size = source.layout.block_bytes
    for here, there in zip(source_ids, target_ids, strict=True):
        pool_bytes(target)[there * size : (there + 1) * size] = pool_bytes(source)[
            here * size : (here + 1) * size
        ]
