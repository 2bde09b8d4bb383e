"""The runner on a device against the one on the CPU: every family, chunks beside decodes, hand-off, rows that fail."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pdserve.engine.attention import Turn
from pdserve.engine.device.runner import DeviceRunner
from pdserve.engine.port import LaunchingRunner, Row, RowOutput, SampleSpec
from pdserve.engine.torch_runner import TorchRunner
from pdserve.errors import InvariantViolated, RowFailed
from pdserve.sampling import SamplingParams
from tests.support.random_families import FAMILIES, VOCAB_SIZE, save_random
from tests.unit.engine_device.driving import BFLOAT16, FP8_KV, make_device_runner
from tests.unit.engine_torch.driving import (
    Stream,
    advance,
    advance_with_logits,
    copy_blocks,
    make_runner,
    sample_key,
)
from tests.unit.engine_torch.random_model import SMALL, write_random_model

VOCABULARY: int = SMALL["vocab_size"]
LOGITS_WITHIN = 1e-4  # of logits with a deviation of about 1
AnyRunner = TorchRunner | DeviceRunner


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def runner(folder: Path) -> DeviceRunner:
    return make_device_runner(folder)


def prompt(length: int, seed: int = 1, size: int = VOCABULARY) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(3, size) for _ in range(length)]


def tables(count: int) -> list[list[int]]:
    """Scattered block tables of 12 blocks each."""
    blocks = list(range(60))
    random.Random(4).shuffle(blocks)
    return [blocks[index * 12 : (index + 1) * 12] for index in range(count)]


def mixed(runner: AnyRunner, size: int) -> tuple[list[list[int]], list[Tensor]]:
    """Three prompts in chunks of 40 whose ends differ: steps of chunks, of both kinds, of single tokens."""
    streams = [
        Stream(prompt(length, length, size), table)
        for length, table in zip((150, 7, 61), tables(3), strict=True)
    ]
    given: list[Tensor] = []
    for _ in range(9):
        given += [
            logits
            for logits in advance_with_logits(runner, [(stream, 40) for stream in streams])
            if logits is not None
        ]
    return [stream.ids for stream in streams], given


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_gives_the_tokens_and_logits_of_the_cpu(name: str, tmp_path: Path) -> None:
    """Windows, soft caps, partial turns, head norms, experts, groups of query heads: what the families have."""
    folder = save_random(name, tmp_path)
    ids, logits = mixed(make_device_runner(folder), VOCAB_SIZE)
    want_ids, want_logits = mixed(make_runner(folder, num_blocks=64), VOCAB_SIZE)
    assert ids == want_ids
    for got, want in zip(logits, want_logits, strict=True):
        assert float((got - want).abs().max()) < LOGITS_WITHIN * max(1.0, float(want.std()))


def test_bfloat16_is_the_same_but_for_rounding(tmp_path: Path) -> None:
    folder = write_random_model(tmp_path, dtype=torch.bfloat16)
    _, logits = mixed(make_device_runner(folder, precision=BFLOAT16), VOCABULARY)
    _, want = mixed(make_runner(folder, num_blocks=64), VOCABULARY)
    assert float((logits[0] - want[0]).norm() / want[0].norm()) < 2.0**-5


def test_a_pool_of_8_bits_is_a_quarter_and_nearly_the_same(folder: Path) -> None:
    runner, whole = make_device_runner(folder, precision=FP8_KV), make_device_runner(folder)
    assert runner.layout.block_bytes * 4 == whole.layout.block_bytes
    assert (
        runner.layout.wire_json() != whole.layout.wire_json()
    )  # workers with the one and the other are no pair
    _, logits = mixed(runner, VOCABULARY)
    _, want = mixed(whole, VOCABULARY)
    assert 0 < float((logits[0] - want[0]).norm() / want[0].norm()) < 0.1


def test_8_bits_keep_the_largest_number_and_not_a_number(folder: Path) -> None:
    runner = make_device_runner(folder, precision=FP8_KV)
    width = 96 + 2 * 32
    projected = torch.zeros(2, width)
    projected[0, -1], projected[0, -2], projected[0, -3] = 1000.0, -1000.0, float("nan")
    turn = Turn(lambda rows, _: rows, torch.empty(0), None)
    runner._kernels.store(1, projected, turn, torch.tensor([3, 20], dtype=torch.int32))
    stored = runner._pool.tensor[0, 1, 1, 1, 3].to(torch.float32)
    assert stored[-2:].tolist() == [-448.0, 448.0]
    assert stored[-3].isnan()


def test_it_is_a_runner(runner: DeviceRunner) -> None:
    port: LaunchingRunner[object] = runner  # type: ignore[assignment]
    assert port.card.vocab_size == VOCABULARY
    assert port.card.cache_seed == bytes.fromhex(port.card.weights_fingerprint)
    assert port.layout.num_blocks == 64
    assert port.pool.num_bytes == port.layout.pool_bytes


def test_a_cpu_worker_and_a_device_share_blocks_and_fingerprint(folder: Path, runner: DeviceRunner) -> None:
    """Prefill on either, decode on the other."""
    here, there = tables(2)
    cpu = make_runner(folder, num_blocks=64)
    assert cpu.card.weights_fingerprint == runner.card.weights_fingerprint
    assert cpu.layout.wire_json() == runner.layout.wire_json()
    for source, target in ((cpu, runner), (runner, cpu)):
        stayed = Stream(prompt(37), here)
        advance(source, [(stayed, 37)])
        moved = Stream(list(stayed.ids), there, num_computed=37, num_prompt_tokens=37)
        copy_blocks(source, here[:3], target, there[:3])
        for _ in range(20):
            advance(source, [(stayed, 1)])
            advance(target, [(moved, 1)])
        assert moved.ids == stayed.ids


def test_seeded_sampling_gives_the_tokens_of_the_cpu(folder: Path, runner: DeviceRunner) -> None:
    params = [
        SamplingParams(temperature=1.0, logprobs=3),
        SamplingParams(temperature=0.8, top_k=20, top_p=0.9),
        SamplingParams(temperature=1.2, min_p=0.05, presence_penalty=0.5, frequency_penalty=0.3),
        SamplingParams(temperature=0, repetition_penalty=1.3),
    ]
    outputs: list[list[RowOutput]] = []
    for each in (runner, make_runner(folder, num_blocks=64)):
        streams = [
            Stream(prompt(20), table, sample_key(one)) for one, table in zip(params, tables(4), strict=True)
        ]
        given: list[RowOutput] = []
        for length in [20] + [1] * 20:
            rows = [stream.row(length) for stream in streams]
            for stream, row, output in zip(streams, rows, each.run(rows), strict=True):
                stream.computed(row, output.token_id)
                given.append(output)
        outputs.append(given)
    ours, theirs = outputs
    assert [output.token_id for output in ours] == [output.token_id for output in theirs]
    for mine, want in zip(ours, theirs, strict=True):
        assert (mine.logprobs is None) == (want.logprobs is None)
        if mine.logprobs is not None and want.logprobs is not None:
            assert mine.logprobs.logprob == pytest.approx(want.logprobs.logprob, abs=1e-4)
            assert [each for each, _ in mine.logprobs.top] == [each for each, _ in want.logprobs.top]


def test_rows_that_fail_alone(runner: DeviceRunner) -> None:
    good, poisoned = Stream(prompt(20), tables(2)[0]), Stream(prompt(20), tables(2)[1])
    advance(runner, [(good, 20), (poisoned, 20)])
    for part in (0, 1):  # a key, a value
        runner._pool.tensor[poisoned.block_table[0], 0, 0, part, 3, 0] = float("nan")
        outside = Row((VOCABULARY,), 0, (50,), good.row(1).sample)
        rows = [outside, poisoned.row(1), good.row(1)]
        outputs = runner.run(rows)
        assert [isinstance(output.error, RowFailed) for output in outputs] == [True, True, False]
        runner._pool.tensor[poisoned.block_table[0], 0, 0, part, 3, 0] = 0.0
    (alone,) = runner.run([Row((), 0, (1,), None)])
    assert alone.error is not None


def ahead(stream: Stream) -> Row:
    """The row behind one whose token isn't known yet."""
    position = len(stream.ids)
    spec = SampleSpec(stream.key, tuple(stream.ids), stream.num_prompt_tokens, num_unknown=1)
    return Row((0,), position, tuple(stream.block_table), spec)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_step_launched_before_the_last_one_is_read_gives_the_same_tokens(
    folder: Path, runner: DeviceRunner, temperature: float
) -> None:
    key = sample_key(SamplingParams(temperature=temperature, min_tokens=5))
    waiting = [Stream(prompt(n, n), table, key) for n, table in zip((20, 33), tables(2), strict=True)]
    for length in [33] + [1] * 10:
        advance(runner, [(stream, length) for stream in waiting])
    streams = [Stream(prompt(n, n), table, key) for n, table in zip((20, 33), tables(2), strict=True)]
    first = [stream.row(33) for stream in streams]
    launched = runner.launch(first)
    for step in range(10):
        # In the other order: a token is found by its row.
        turned = list(reversed(streams)) if step % 2 == 0 else streams
        after = {0: 1, 1: 0}
        following = runner.launch([ahead(stream) for stream in turned], after)
        outputs = runner.collect(launched)
        order = streams if step % 2 == 0 else list(reversed(streams))
        for stream, output in zip(order, outputs, strict=True):
            assert output.token_id is not None
            stream.ids.append(output.token_id)
        launched = following
    for stream, output in zip(streams, runner.collect(launched), strict=True):
        assert output.token_id is not None
        stream.ids.append(output.token_id)
    assert [stream.ids for stream in streams] == [stream.ids for stream in waiting]


def test_steps_are_collected_in_order_and_two_at_most_are_in_flight(runner: DeviceRunner) -> None:
    rows = [Stream(prompt(20), tables(1)[0]).row(20)]
    first, second = runner.launch(rows), runner.launch(rows)
    with pytest.raises(InvariantViolated):
        runner.launch(rows)
    with pytest.raises(InvariantViolated):
        runner.collect(second)
    assert runner.collect(first)[0].token_id == runner.collect(second)[0].token_id
    with pytest.raises(InvariantViolated):
        runner.collect(second)
