"""`deterministic`: the bits of a sequence's logits depend on its ids alone.

Not on chunk sizes, company, cache hits, the worker that computed the KV, nor on prefill or decode being its way in.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pdserve.engine.numerics import LinearKind, Precision, choose_precision
from pdserve.engine.torch_runner import TorchRunner
from tests.unit.engine_torch.driving import Stream, advance_with_logits, copy_blocks, make_runner
from tests.unit.engine_torch.random_model import SMALL, WIDE, write_random_model

BFLOAT16 = torch.bfloat16
PRECISIONS = {
    "float32": None,
    "bfloat16": None,
    "float32 plain": Precision("float32", torch.float32, torch.float32, LinearKind.PLAIN),
    "bfloat16 half": Precision("bfloat16", torch.float32, BFLOAT16, LinearKind.FBGEMM_HALF),
}
# Each arithmetic once: one of these is what `bfloat16` means on this CPU.
DISTINCT = [name for name, precision in PRECISIONS.items() if precision != choose_precision("bfloat16")]
NUM_DECODED = 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("model"), dtype=BFLOAT16)


@pytest.fixture(scope="module", params=DISTINCT)
def pair(folder: Path, request: pytest.FixtureRequest) -> tuple[TorchRunner, TorchRunner]:
    """Two workers of equal numerics."""
    precision = PRECISIONS[request.param]
    first, second = (
        make_runner(
            folder, dtype=request.param.split()[0], deterministic=True, num_blocks=400, precision=precision
        )
        for _ in range(2)
    )
    assert first.card.numerics == second.card.numerics
    return first, second


@dataclass
class Play:
    """Runs one sequence among others and keeps the logits of each of its positions that were sampled."""

    runner: TorchRunner
    stream: Stream
    others: list[Stream] = field(default_factory=list)
    source: random.Random = field(default_factory=lambda: random.Random(3))
    logits: dict[int, Tensor] = field(default_factory=dict)

    def step(self, length: int) -> None:
        parts = [(self.stream, length)]
        for other in self.others:
            parts.append((other, self.source.choice([1, 7, 16, 33])))
        self.source.shuffle(parts)
        position = len(self.stream.ids)
        for (stream, _), logits in zip(parts, advance_with_logits(self.runner, parts), strict=True):
            if stream is self.stream and logits is not None:
                self.logits[position] = logits

    def finish(self, chunk: int) -> Play:
        """Prefill in chunks, then decode."""
        while self.stream.num_computed < len(self.stream.ids) - 1 or not self.logits:
            self.step(chunk)
        while len(self.logits) < NUM_DECODED:
            self.step(1)
        return self


def prompt(length: int, seed: int = 1) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(SMALL["vocab_size"]) for _ in range(length)]


def blocks(seed: int, count: int) -> list[list[int]]:
    """Scattered tables of 24 blocks each."""
    ids = list(range(400))
    random.Random(seed).shuffle(ids)
    return [ids[index * 24 : (index + 1) * 24] for index in range(count)]


def assert_equal_bits(got: Play, want: Play) -> None:
    assert got.stream.ids == want.stream.ids
    for position in got.logits.keys() & want.logits.keys():
        assert torch.equal(got.logits[position], want.logits[position]), f"position {position}"


@pytest.mark.parametrize(("length", "chunk"), [(5, 1), (16, 7), (17, 16), (130, 37), (300, 64)])
def test_chunks(pair: tuple[TorchRunner, TorchRunner], length: int, chunk: int) -> None:
    whole = Play(pair[0], Stream(prompt(length), blocks(1, 1)[0])).finish(512)
    cut = Play(pair[0], Stream(prompt(length), blocks(2, 1)[0])).finish(chunk)
    assert_equal_bits(cut, whole)


@pytest.mark.parametrize("company", [1, 15])
def test_company(pair: tuple[TorchRunner, TorchRunner], company: int) -> None:
    alone = Play(pair[0], Stream(prompt(90), blocks(1, 1)[0])).finish(512)
    mine, *tables = blocks(2, company + 1)
    others = [Stream(prompt(7 * index + 3, seed=index), table) for index, table in enumerate(tables, 1)]
    accompanied = Play(pair[0], Stream(prompt(90), mine), others).finish(64)
    assert_equal_bits(accompanied, alone)


@pytest.mark.parametrize("num_hits", [1, 5])
def test_cache_hits(pair: tuple[TorchRunner, TorchRunner], num_hits: int) -> None:
    first, second = blocks(1, 2)
    whole = Play(pair[0], Stream(prompt(90), first)).finish(512)
    shared = Stream(prompt(90), first[:num_hits] + second, num_computed=16 * num_hits)
    assert_equal_bits(Play(pair[0], shared).finish(64), whole)


def test_decoded_tokens_recomputed_by_prefill(pair: tuple[TorchRunner, TorchRunner]) -> None:
    """Preemption and replay: what decode wrote, prefill writes again, bit for bit."""
    first, second = blocks(1, 2)
    want = Play(pair[0], Stream(prompt(45), first)).finish(512)
    again = Stream(want.stream.ids[:50], second, num_prompt_tokens=45)
    got = Play(pair[1], again)
    while len(again.ids) < len(want.stream.ids):
        got.step(33)
    assert_equal_bits(got, want)


@pytest.mark.parametrize("length", [48, 90])
def test_another_worker_goes_on(pair: tuple[TorchRunner, TorchRunner], length: int) -> None:
    """Prefill in one runner, blocks copied, decode in the other = all in one."""
    prefill, decode = pair
    here, there = blocks(1, 2)
    aggregated = Play(decode, Stream(prompt(length), blocks(5, 1)[0])).finish(512)
    before = Play(prefill, Stream(prompt(length), here))
    while not before.logits:
        before.step(64)
    count = prefill.layout.blocks_for(length)
    copy_blocks(prefill, here[:count], decode, there[:count])
    moved = Stream(list(before.stream.ids), there, num_computed=length, num_prompt_tokens=length)
    after = Play(decode, moved, [Stream(prompt(33, seed=8), blocks(6, 1)[0])], logits=before.logits)
    assert_equal_bits(after.finish(1), aggregated)


def test_two_threads(folder: Path) -> None:
    """The promise holds for any number of threads, as long as all workers have the same."""
    runner = make_runner(folder, dtype="bfloat16", deterministic=True, num_blocks=400, num_threads=2)
    whole = Play(runner, Stream(prompt(130), blocks(1, 1)[0])).finish(512)
    cut = Play(runner, Stream(prompt(130), blocks(2, 1)[0]), [Stream(prompt(20, 2), blocks(3, 1)[0])]).finish(
        37
    )
    assert_equal_bits(cut, whole)
    assert runner.card.numerics != make_runner(folder, dtype="bfloat16", deterministic=True).card.numerics


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_many_threads(dtype: str, tmp_path: Path) -> None:
    """More than divide the widths: elementwise work must not be cut in the middle of a row."""
    folder = write_random_model(tmp_path, dtype=BFLOAT16, **WIDE)
    runner = make_runner(folder, dtype=dtype, deterministic=True, num_blocks=400, num_threads=7)
    whole = Play(runner, Stream(prompt(300), blocks(1, 1)[0])).finish(512)
    cut = Play(runner, Stream(prompt(300), blocks(2, 1)[0])).finish(64)
    assert_equal_bits(cut, whole)


def test_numerics_tell_other_bits(folder: Path, tmp_path: Path) -> None:
    """Arithmetic that has the same name everywhere and differs is told by what it computes."""
    other = write_random_model(tmp_path, dtype=BFLOAT16, seed=1)
    cards = [make_runner(each, dtype="bfloat16", deterministic=True).card for each in (folder, folder, other)]
    first, second, third = ([*card.numerics.rpartition("/bits")] for card in cards)
    assert first == second
    assert first[:-1] == third[:-1] and first != third


def test_without_it_the_bits_do_differ(folder: Path) -> None:
    """The tests above would notice: the fast form fails them."""
    runner = make_runner(folder, dtype="float32", num_blocks=400)
    whole = Play(runner, Stream(prompt(130), blocks(1, 1)[0])).finish(512)
    cut = Play(runner, Stream(prompt(130), blocks(2, 1)[0])).finish(37)
    assert any(not torch.equal(cut.logits[position], whole.logits[position]) for position in whole.logits)
